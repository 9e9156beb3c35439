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
		{"explain", ExitUsage, "wrong number of arguments; usage: pilaster explain ADDRESS"},
		{"version nonsense", ExitUsage, "wrong number of arguments; usage: pilaster version"},
		{"sysdump a b", ExitUsage, "wrong number of arguments; usage: pilaster sysdump [FILE.tar.gz]"},
		{"explain --nonsense", ExitUsage, "unknown flag"},
		{"explain fd70::1 -o yaml", ExitUsage, "text or json"},
		{"help tenant", ExitDone, ""},
		{"help tenant nonsense", ExitUsage, `there is no command "tenant nonsense"; see pilaster --help`},
		{"completion bash", ExitDone, ""},
		{"--version", ExitDone, ""},
		{"completion nonsense", ExitUsage, `unknown command "nonsense"`},
		{"explain --nonsense", ExitUsage, "; see pilaster explain --help"},
		{"preflight", ExitUsage, `"uplink" not set; see pilaster preflight --help`},
		{"preflight --uplink lo --token-file x", ExitUsage, "missing [orchestrator]; see pilaster preflight --help"},
		{"preflight --uplink lo --orchestrator https://[::1]:1 --token-file /nonexistent", ExitUsage,
			"--token-file: open /nonexistent: no such file or directory; nothing was checked"},
		{"preflight --uplink lo --device foo", ExitUsage,
			`invalid argument "foo" for "--device" flag: use veth, macvlan, netkit, auto`},
		{"agent --device foo", ExitUsage,
			`invalid argument "foo" for "--device" flag: use veth, macvlan, netkit, auto`},
		{"preflight --base-prefix x", ExitUsage, `--base-prefix "x": use a prefix such as`},
		{"preflight --mtu-reserve x", ExitUsage, `--mtu-reserve "x": use a whole number`},
		{"orchestrator restore x --skip -1", ExitUsage, `--skip "-1": use a whole number, 0 or more`},
		{"bench scale --endpoints 1,0", ExitUsage, "--endpoints 0: choose 1 to 65535"},
		{"bench scale --peers 1048577", ExitUsage, "--peers 1048577: choose 1 to 1048576"},
		{"bench scale --quick --full", ExitUsage, "[full quick]"},
		{"bench nic --figure 9", ExitUsage, `--figure "9": use one of 7, 8, 12, all`},
		{"bench nic --figure 8 --seed -1", ExitUsage, "--seed"},
		{"bench nic -o yaml", ExitUsage, "use text, json or a folder"},
		{"bench scale --peers x", ExitUsage, `--peers "x": use whole numbers`},
		{"tenant rotate-key blue --wait soon", ExitUsage, `--wait "soon": use a duration`},
		{"tenant create blue -o yaml --orchestrator-socket /nonexistent/o.sock", ExitUsage, "text or json"},
		{"explain fd70::1 --agent-socket /nonexistent/agent.sock", ExitUnreachable, "no daemon listens on " +
			"/nonexistent/agent.sock (connect: no such file or directory)\n  run this command where an agent runs; " +
			"if it should run here, start it"},
		{"tenant list --orchestrator-socket /nonexistent/o.sock", ExitUnreachable, "where an orchestrator runs; if " +
			"it should run here, start it, or set its socket with --orchestrator-socket"},
	} {
		code, out, errs := run(t, "", strings.Fields(c.line)...)
		if code != c.code || !strings.Contains(errs, c.says) || (errs == "") != (code == ExitDone) {
			t.Errorf("pilaster %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				c.line, code, out, errs, c.code, c.says)
		}
	}
}

// Completion offers file names only to commands that take a file.
func TestCompletionOfArguments(t *testing.T) {
	for line, files := range map[string]bool{
		"tenant get": false, "node delete": false, "endpoint get": false, "explain": false, "orchestrator backup": true,
		"sysdump": true, "sim run": true,
	} {
		_, out, _ := run(t, "", append(append([]string{"__complete"}, strings.Fields(line)...), "")...)
		if strings.Contains(out, ":0\n") != files || strings.Contains(out, ":4\n") == files {
			t.Errorf("pilaster %s <TAB>: %q, want file names: %v", line, out, files)
		}
	}
}
