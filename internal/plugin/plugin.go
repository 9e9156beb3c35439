package plugin

import (
	"strconv"
	"strings"
)

// DefaultSocket is where the agent is looked for unless "agentSocket" says otherwise.
const DefaultSocket = "/run/pilaster/agent.sock"

// Codes of CNI for what the agent cannot answer itself.
const (
	codeIO       = 5
	codeConfig   = 7
	codeTryAgain = 11
	codeStatus   = 50 // STATUS: an ADD would not be taken now
	codeInternal = 999
)

// Known without an agent.
const (
	versions = `{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}` + "\n"
	about    = "Pilaster's CNI plugin: it asks the agent of this node; see https://www.cni.dev for how it is called\n" +
		"CNI protocol versions supported: 1.0.0, 1.1.0\n"
)

// Run is one call by a runtime: what it gets on its standard output and error, and the exit code. What is not
// an answer of the agent is one here: a runtime always gets a result or an error of CNI.
func Run(environ []string, stdin func() ([]byte, error)) (stdout, stderr string, exit int) {
	var said []byte // each variable of CNI with a NUL behind it, which none can contain
	command := ""
	for _, variable := range environ {
		if !strings.HasPrefix(variable, "CNI_") {
			continue
		}
		said = append(append(said, variable...), 0)
		if value, is := strings.CutPrefix(variable, "CNI_COMMAND="); is {
			command = value
		}
	}
	switch command {
	case "":
		return "", about, 0
	case "VERSION":
		return versions, "", 0
	}
	config, err := stdin()
	if err != nil {
		return refusal(codeIO, "the configuration cannot be read from standard input: "+err.Error()), "", 1
	}
	socket, refused := findSocket(config)
	if refused != "" {
		return refusal(codeConfig, "the network configuration cannot be used: "+refused), "", 1
	}
	// An empty variable ends the environment.
	answer, err := ask(socket, append(append(said, 0), config...))
	if err != nil {
		code := codeTryAgain
		if command == "STATUS" {
			code = codeStatus
		}
		return refusal(code, "the agent on "+socket+" does not answer: "+err.Error()), "", 1
	}
	switch {
	case answer.status == "404":
		return refusal(codeInternal, "the agent on "+socket+" does not know /cni, so it is older than this plugin; nothing was changed; upgrade the agent"), "", 1
	case answer.status != "200" || answer.exit < 0:
		return refusal(codeInternal, socket+" answers with HTTP status "+answer.status+" and is no agent of Pilaster; correct agentSocket"), "", 1
	}
	return answer.body, "", answer.exit
}

// refusal is an error as CNI wants it on standard output.
func refusal(code int, message string) string {
	return `{"code":` + strconv.Itoa(code) + `,"msg":` + quote(message) + "}\n"
}

// quote is text as a JSON string.
func quote(text string) string {
	const hex = "0123456789abcdef"
	out := []byte{'"'}
	for _, r := range text { // what is not UTF-8 becomes U+FFFD
		switch {
		case r == '"' || r == '\\':
			out = append(out, '\\', byte(r))
		case r < ' ':
			out = append(out, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default:
			out = append(out, string(r)...)
		}
	}
	return string(append(out, '"'))
}
