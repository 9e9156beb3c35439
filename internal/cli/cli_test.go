package cli

import (
	"bytes"
	"strings"
	"testing"
)

// run executes one command line as a shell would.
func run(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = Run(t.Context(), Env{Args: args, Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errs})
	return code, out.String(), errs.String()
}

func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		line string
		code int
		says string
	}{
		{"", ExitDone, ""},
		{"address", ExitDone, ""},
		{"nonsense", ExitUsage, `unknown command "nonsense" for "pilaster"; see pilaster --help`},
		{"address nonsense", ExitUsage, `unknown command "nonsense"`},
		{"address encrypt", ExitUsage, `"key" not set`},
		{"explain", ExitUsage, "the arguments do not fit; usage: pilaster explain ADDRESS"},
		{"version nonsense", ExitUsage, "the arguments do not fit; usage: pilaster version"},
		{"sysdump a b", ExitUsage, "the arguments do not fit; usage: pilaster sysdump [FILE.tar.gz]"},
		{"explain --nonsense", ExitUsage, "unknown flag"},
		{"explain fd70::1 -o yaml", ExitUsage, "text or json"},
		{"tenant create blue -o yaml --orchestrator-socket /nonexistent/o.sock", ExitUsage, "text or json"},
		{"explain fd70::1 --agent-socket /nonexistent/agent.sock", ExitUnreachable, "nobody answers on /nonexistent/agent.sock"},
	} {
		code, out, errs := run(t, "", strings.Fields(c.line)...)
		if code != c.code || !strings.Contains(errs, c.says) || (errs == "") != (code == ExitDone) {
			t.Errorf("pilaster %s: exit %d, stdout %q, stderr %q", c.line, code, out, errs)
		}
	}
}
