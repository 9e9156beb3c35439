package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBenchNetworksRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	other, marked := filepath.Join(t.TempDir(), "other.json"), filepath.Join(t.TempDir(), "report.json")
	for path, text := range map[string]string{other: "{}", marked: `{"speed": {"results": []}, "pass": true}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for line, says := range map[string]string{
		"--networks native,nonsense":     `there is no network "nonsense"; use some of native, netpila, `,
		"--networks=":                    "--networks is empty",
		"--quick --full":                 "none of the others can be",
		"--from x --networks native":     "none of the others can be",
		"--from x --flannel sh":          "none of the others can be",
		"--from /nonexistent/x":          "no such file",
		"--from " + other:                "is no report of bench networks",
		"--flannel /nonexistent/flannel": "no such file",
		"--peer flannel":                 "use NAME=COMMAND",
		"--peer native=sh":               "there is a scenario native already",
		"-o xml":                         "use text, json or a folder",
		"nonsense":                       "wrong number of arguments",
	} {
		code, out, errs := run(t, "", append([]string{"bench", "networks"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("bench networks %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
	page := filepath.Join(t.TempDir(), "page.md")
	if err := os.WriteFile(page, []byte("no tables"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(t, ExitFailed, "the file was not changed", "bench", "networks", "--from", marked, "--page", page)
	r := command(t, "__complete", "bench", "networks", "--networks", "native,")
	if !strings.Contains(r.stdout, "native,ila") {
		t.Errorf("--networks native,<TAB>: %q, want native,ila", r.stdout)
	}
}

// TestMigrateReasons: a network to which no tenant can move is refused with the reasons.
func TestMigrateReasons(t *testing.T) {
	for to, says := range map[string]string{
		"ila":   "from netpila: a move needs containers with addresses of both networks",
		"later": "can migrate only to evpn, netpila or nimitz",
	} {
		refused(t, ExitUsage, says, "tenant", "migrate", "green", "--to", to)
	}
}
