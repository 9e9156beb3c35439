package cniclient

import (
	"strings"
	"syscall"
	"unicode/utf8"
)

// DefaultSocket is the agent's socket unless the configuration has "agentSocket".
const DefaultSocket = "/run/pilaster/agent.sock"

// CNI error codes for errors without a response from the agent.
const (
	codeIO       = "5"
	codeConfig   = "7"
	codeTryAgain = "11"
	codeStatus   = "50" // of STATUS: the agent cannot process an ADD now
	codeInternal = "999"
)

// Responses that need no agent.
const (
	versions = `{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}` + "\n"
	about    = "Pilaster's CNI plugin: it passes calls of a container runtime to the node's agent; " +
		"see https://www.cni.dev\n" +
		"CNI protocol versions supported: 1.0.0, 1.1.0\n"
)

// Sizes in bytes.
const (
	maxCall   = 32 << 20 // the agent's limit
	maxAnswer = 1 << 20
	maxText   = 4096 // of a quotation in an error
)

// Call is one call by a runtime, with all memory that the plugin needs. The kernel allocates no pages for unused parts.
type Call struct {
	Kernel  func(number, a, b, c, d, e, f uintptr) (r1, r2 uintptr, err syscall.Errno)
	command [16]byte // the beginning of CNI_COMMAND
	request [maxHead + maxCall]byte
	end     int // of the used part of request
	answer  [maxAnswer]byte
	socket  [maxText]byte
	key     [len(socketKey) + 2*utf8.UTFMax]byte // enough for the key in any letter case
	other   [len(socketKey) + 2*utf8.UTFMax]byte
	out     [1 << 16]byte
	address syscall.RawSockaddrUnix
	poll    pollFd
	left    syscall.Timespec // of timeout
	why     [64]byte
}

// Variable adds a variable of the environment to the request. Call it for each variable before Run.
func (c *Call) Variable(v string) {
	if !strings.HasPrefix(v, "CNI_") {
		return
	}
	if value, is := strings.CutPrefix(v, "CNI_COMMAND="); is {
		c.command = [len(c.command)]byte{}
		copy(c.command[:], value)
	}
	c.add(v)
	c.add("\x00") // ends the variable, because no variable contains a NUL
}

// add appends text to the request, up to the agent's limit.
func (c *Call) add(text string) {
	c.end = max(c.end, maxHead)
	c.end += copy(c.request[c.end:], text)
}

func (c *Call) verb() string {
	verb, _, _ := strings.Cut(view(c.command[:]), "\x00")
	return verb
}

// Run performs the call and returns the plugin's standard output, standard error and exit code. Without a response from
// the agent, it returns an error in CNI's format.
func (c *Call) Run(stdin int) (stdout, stderr string, exit int) {
	switch c.verb() {
	case "":
		return "", about, 0
	case "VERSION":
		return versions, "", 0
	}
	c.add("\x00") // an empty variable, which ends the environment
	n, failed := c.read(stdin, c.request[c.end:], nil)
	if failed != 0 {
		return c.refusal(
			codeIO,
			"reading the configuration from standard input failed; nothing was changed: ",
			c.describe(failed),
		), "", 1
	}
	if n == len(c.request)-c.end {
		return c.refusal(codeIO, "the configuration is longer than 32 MiB; nothing was changed"), "", 1
	}
	config := c.request[c.end:][:n]
	c.end += n
	socket, refused := c.findSocket(config)
	if refused != "" {
		return refused, "", 1
	}
	r, call, why := c.roundTrip(socket)
	if why != "" {
		code := codeTryAgain
		if c.verb() == "STATUS" {
			code = codeStatus
		}
		return c.refusal(code, "the agent on ", socket, " does not answer: ", call, why), "", 1
	}
	switch {
	case r.status == "404":
		return c.refusal(
			codeInternal,
			"the agent on ",
			socket,
			" does not know /cni, so it is older than this plugin; nothing was changed; upgrade the agent",
		), "", 1
	case r.status != "200" || r.exit < 0:
		return c.refusal(
			codeInternal,
			socket,
			" answers with HTTP status ",
			r.status,
			", so it is not an agent of Pilaster; nothing was changed; correct agentSocket",
		), "", 1
	}
	return r.body, "", r.exit
}

// refusal returns an error in CNI's format for standard output.
func (c *Call) refusal(code string, message ...string) string {
	out := add(add(add(c.out[:0], `{"code":`), code), `,"msg":"`)
	for _, part := range message {
		out = escape(out, part)
	}
	return view(add(out, "\"}\n"))
}
