package cniclient

import (
	"strings"
	"syscall"
	"unicode/utf8"
)

// DefaultSocket is where the agent is looked for unless "agentSocket" says otherwise.
const DefaultSocket = "/run/pilaster/agent.sock"

// Codes of CNI for what the agent cannot answer itself.
const (
	codeIO       = "5"
	codeConfig   = "7"
	codeTryAgain = "11"
	codeStatus   = "50" // STATUS: an ADD would not be taken now
	codeInternal = "999"
)

// Known without an agent.
const (
	versions = `{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}` + "\n"
	about    = "Pilaster's CNI plugin: it asks the agent of this node; see https://www.cni.dev for how it is called\n" +
		"CNI protocol versions supported: 1.0.0, 1.1.0\n"
)

// In bytes. The agent takes no longer call.
const (
	maxCall   = 32 << 20
	maxAnswer = 1 << 20
	maxText   = 4096 // of what a message quotes
)

// Call is one call by a runtime, and all the memory it takes. Pages that are not used cost nothing.
type Call struct {
	Kernel  func(number, a, b, c, d, e, f uintptr) (r1, r2 uintptr, err syscall.Errno)
	command [16]byte // what CNI_COMMAND is, or begins with
	said    [maxHead + maxCall]byte
	end     int // of said
	came    [maxAnswer]byte
	socket  [maxText]byte
	key     [len(socketKey) + 2*utf8.UTFMax]byte // room for that key in any case
	other   [len(socketKey) + 2*utf8.UTFMax]byte
	out     [1 << 16]byte
	address syscall.RawSockaddrUnix
	poll    pollFd
	left    syscall.Timespec // of patience
	why     [64]byte
}

// Variable receives each variable of the environment; call it before Run.
func (c *Call) Variable(v string) {
	if !strings.HasPrefix(v, "CNI_") {
		return
	}
	if value, is := strings.CutPrefix(v, "CNI_COMMAND="); is {
		c.command = [len(c.command)]byte{}
		copy(c.command[:], value)
	}
	c.say(v)
	c.say("\x00") // which no variable contains
}

// say leaves out what is more than any agent takes.
func (c *Call) say(text string) {
	c.end = max(c.end, maxHead)
	c.end += copy(c.said[c.end:], text)
}

func (c *Call) verb() string {
	verb, _, _ := strings.Cut(view(c.command[:]), "\x00")
	return verb
}

// Run is the rest of the call: what the runtime gets on its standard output and error, and the exit code. What is not
// an answer of the agent is one here: a runtime always gets a result or an error of CNI.
func (c *Call) Run(stdin int) (stdout, stderr string, exit int) {
	switch c.verb() {
	case "":
		return "", about, 0
	case "VERSION":
		return versions, "", 0
	}
	c.say("\x00") // an empty variable ends the environment
	n, failed := c.read(stdin, c.said[c.end:], nil)
	if failed != 0 {
		return c.refusal(codeIO, "the configuration cannot be read from standard input: ", c.describe(failed)), "", 1
	}
	if n == len(c.said)-c.end {
		return c.refusal(codeIO, "the configuration is longer than 32 MiB; nothing was changed"), "", 1
	}
	config := c.said[c.end:][:n]
	c.end += n
	socket, refused := c.findSocket(config)
	if refused != "" {
		return refused, "", 1
	}
	answer, call, why := c.ask(socket)
	if why != "" {
		code := codeTryAgain
		if c.verb() == "STATUS" {
			code = codeStatus
		}
		return c.refusal(code, "the agent on ", socket, " does not answer: ", call, why), "", 1
	}
	switch {
	case answer.status == "404":
		return c.refusal(
			codeInternal,
			"the agent on ",
			socket,
			" does not know /cni, so it is older than this plugin; nothing was changed; upgrade the agent",
		), "", 1
	case answer.status != "200" || answer.exit < 0:
		return c.refusal(
			codeInternal,
			socket,
			" answers with HTTP status ",
			answer.status,
			" and is no agent of Pilaster; correct agentSocket",
		), "", 1
	}
	return answer.body, "", answer.exit
}

// refusal is an error as CNI wants it on standard output.
func (c *Call) refusal(code string, message ...string) string {
	out := add(add(add(c.out[:0], `{"code":`), code), `,"msg":"`)
	for _, part := range message {
		out = escape(out, part)
	}
	return view(add(out, "\"}\n"))
}
