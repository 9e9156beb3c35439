package systemd_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/cli"
)

const installed = "/usr/local/bin/pilaster"

// units writes copies of the units, changed by the given function, and returns their paths. The copies use the test's
// binary, because systemd requires that the file exists.
func units(t *testing.T, change func(string) string) []string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sources, err := filepath.Glob("*.service")
	if err != nil || len(sources) != 3 {
		t.Fatalf("units %v, %v", sources, err)
	}
	var out []string
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		unit := filepath.Join(t.TempDir(), source)
		copied := change(strings.ReplaceAll(string(text), installed, self))
		if err := os.WriteFile(unit, []byte(copied), 0o644); err != nil {
			t.Fatal(err)
		}
		out = append(out, unit)
	}
	return out
}

// verify returns the output of systemd-analyze verify, which is empty for valid units.
func verify(units []string) string {
	out, err := exec.Command("systemd-analyze", append([]string{"verify", "--man=no"}, units...)...).CombinedOutput()
	if err != nil {
		return string(out) + err.Error()
	}
	return string(out)
}

func TestSystemdAcceptsUnits(t *testing.T) {
	if said := verify(units(t, func(s string) string { return s })); said != "" {
		t.Errorf("systemd-analyze verify: %s, want no output", said)
	}
	// systemd-analyze must report a misspelt setting.
	spoiled := units(t, func(s string) string { return strings.ReplaceAll(s, "Type=notify", "Type=notified") })
	if said := verify(spoiled); !strings.Contains(said, "notified") {
		t.Errorf("systemd-analyze verify accepts Type=notified: %q", said)
	}
}

// The program must accept the command lines in the units and in the examples.
func TestCommandLines(t *testing.T) {
	command := regexp.MustCompile(`(?m)^ExecStart=\S+ (.*) \$PILASTER_\w+_ARGS$`)
	example := regexp.MustCompile(`(?s)# PILASTER_\w+_ARGS, for example:(.*?)\nEnv`)
	for _, unit := range units(t, func(s string) string { return s }) {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		called, shown := command.FindSubmatch(text), example.FindSubmatch(text)
		if called == nil || shown == nil {
			t.Fatalf("%s has no command line or no example", unit)
		}
		args := strings.Fields(string(called[1]) + strings.ReplaceAll(string(shown[1]), "#", "") + " --help")
		var said bytes.Buffer
		if code := cli.Run(t.Context(), cli.Env{Args: args, Stdout: &said, Stderr: &said}); code != cli.ExitDone {
			t.Errorf("pilaster %s: exit %d\n%s", strings.Join(args, " "), code, &said)
		}
	}
}

func TestUnitsAreConfined(t *testing.T) {
	// Highest exposure that systemd may compute, in tenths. Its scale is 0 (none) to 10.
	most := map[string]string{
		"pilaster-orchestrator.service": "25", "pilaster-agent.service": "45",
		"pilaster-accelerate.service": "45",
	}
	for _, unit := range units(t, func(s string) string { return s }) {
		out, err := exec.Command("systemd-analyze", "security", "--offline=yes", "--no-pager",
			"--threshold="+most[filepath.Base(unit)], unit).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", filepath.Base(unit), err, out)
		}
	}
}
