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

// units writes the units to a folder with the installed binary replaced by one that exists here,
// as systemd looks for it, and changed as a test wants.
func units(t *testing.T, change func(string) string) []string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sources, err := filepath.Glob("*.service")
	if err != nil || len(sources) != 2 {
		t.Fatalf("units %v, %v", sources, err)
	}
	var out []string
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		unit := filepath.Join(t.TempDir(), source)
		if err := os.WriteFile(unit, []byte(change(strings.ReplaceAll(string(text), installed, self))), 0o644); err != nil {
			t.Fatal(err)
		}
		out = append(out, unit)
	}
	return out
}

// verify is empty when systemd has nothing to say about the units.
func verify(units []string) string {
	out, err := exec.Command("systemd-analyze", append([]string{"verify", "--man=no"}, units...)...).CombinedOutput()
	if err != nil {
		return string(out) + err.Error()
	}
	return string(out)
}

func TestSystemdAcceptsUnits(t *testing.T) {
	if said := verify(units(t, func(s string) string { return s })); said != "" {
		t.Errorf("systemd-analyze verify: %s", said)
	}
	// The judge is awake: it sees a misspelt setting.
	spoiled := units(t, func(s string) string { return strings.ReplaceAll(s, "Type=notify", "Type=notified") })
	if said := verify(spoiled); !strings.Contains(said, "notified") {
		t.Errorf("systemd-analyze verify took Type=notified: %q", said)
	}
}

// The command lines in the units, and the examples above them, are ones the program takes.
func TestUnitsCallTheProgram(t *testing.T) {
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
	// The exposure systemd computes, in tenths of its 0 (none) to 10.
	most := map[string]string{"pilaster-orchestrator.service": "25", "pilaster-agent.service": "45"}
	for _, unit := range units(t, func(s string) string { return s }) {
		out, err := exec.Command("systemd-analyze", "security", "--offline=yes", "--no-pager",
			"--threshold="+most[filepath.Base(unit)], unit).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", filepath.Base(unit), err, out)
		}
	}
}
