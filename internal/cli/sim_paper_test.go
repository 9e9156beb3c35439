package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSimPaperMistakes(t *testing.T) {
	t.Parallel()
	for line, says := range map[string]string{
		"--only fig8":                         `there is no figure "fig8"; use some of fig7, fig9, `,
		"--only=":                             "--only is empty",
		"--quick --full":                      "none of the others can be",
		"--only fig12 -o csv":                 "use text, json or a folder",
		"--only fig12 -o /dev/null/x":         "not a directory; nothing was measured",
		"--only fig9 --data-dir /nonexistent": "--data-dir /nonexistent is no folder; nothing was simulated",
		"x":                                   "wrong number of arguments",
	} {
		code, out, errs := run(t, "", append([]string{"sim", "paper"}, strings.Fields(line)...)...)
		if code != ExitUsage || !strings.Contains(errs, says) || out != "" {
			t.Errorf("sim paper %s: exit %d, stdout %q, stderr %q; want exit %d, stderr with %q",
				line, code, out, errs, ExitUsage, says)
		}
	}
	if _, offers, _ := run(t, "", "__complete", "sim", "paper", "--only", "fig9,tab"); !strings.Contains(
		offers,
		"fig9,table1\n",
	) {
		t.Errorf("--only fig9,tab<TAB>: %q, want fig9,table1", offers)
	}
}

// TestSimPaperFails: if Open vSwitch is not installed, the command runs nothing. If Open vSwitch does not start, the
// command names the failed figure and plots the other figure.
func TestSimPaperFails(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	programs := t.TempDir()
	t.Setenv("PATH", programs)
	code, out, errs := run(t, "", "sim", "paper", "--only", "fig10,fig12")
	if code != ExitFailed || !strings.Contains(errs, "fig10: ") ||
		!strings.Contains(errs, "leave them out with --only fig12; nothing was run") ||
		out != "" {
		t.Errorf("without Open vSwitch: exit %d, stdout %q, stderr %q", code, out, errs)
	}
	for _, name := range []string{"ovsdb-tool", "ovsdb-server", "ovs-vswitchd"} {
		if err := os.WriteFile(filepath.Join(programs, name), []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	folder := filepath.Join(t.TempDir(), "figures")
	code, out, errs = run(t, "", "sim", "paper", "--quick", "--only", "fig10,fig12", "-o", folder)
	if code != ExitFailed || !strings.Contains(errs, "pilaster: fig10: ") && !strings.Contains(errs, "\nfig10: ") ||
		!strings.Contains(out, "fig12: ") {
		t.Errorf("with one that fails: exit %d, stdout %q, stderr %q", code, out, errs)
	}
	for _, name := range []string{"index.html", "fig10.json", "fig10.tsv", "fig12.json", "fig12.tsv"} {
		if b, err := os.ReadFile(filepath.Join(folder, name)); err != nil ||
			name == "fig10.tsv" && !strings.Contains(string(b), "# failed: ") {
			t.Errorf("%v, %s: %s", err, name, b)
		}
	}
}
