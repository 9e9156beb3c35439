package cli

import (
	"os"
	"path/filepath"
	"testing"
)

// TestSteeringArguments: wrong arguments are usage errors that say what to use, and devices that do not exist are
// failures. Nothing is recorded.
func TestSteeringArguments(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	t.Setenv("PILASTER_RUN_DIR", dir)
	rps := []string{"steering", "apply", "--mode", "rps"}
	for _, c := range []struct {
		code int
		want string
		args []string
	}{
		{ExitUsage, `required flag(s) "mode"`, []string{"steering", "apply", "--uplink", "eth0"}},
		{ExitUsage, "use off, rps, rfs, auto", []string{"steering", "apply", "--mode", "rss"}},
		{ExitUsage, "level host needs --uplink", rps},
		{ExitUsage, `level "pod": use some of host,overlay,container`, append(rps, "--levels", "pod")},
		{ExitUsage, "no level", append(rps, "--levels", "")},
		{ExitUsage, `--cpus: "x" is no list of CPUs`, append(rps, "--uplink", "x", "--cpus", "x")},
		{ExitUsage, `--cpus: "" is no list of CPUs`, append(rps, "--uplink", "x", "--cpus=")},
		{ExitUsage, "--flows 0: use 1 to", append(rps, "--uplink", "x", "--flows", "0")},
		{ExitUsage, "--host-flow-entries -1", append(rps, "--uplink", "x", "--host-flow-entries", "-1")},
		{ExitUsage, "needs --containers", append(rps, "--levels", "container")},
		{ExitUsage, "there is no such file", append(rps, "--levels", "container", "--containers", dir+"/none*")},
		{ExitUsage, "--overlay needs level overlay", append(rps, "--uplink", "x", "--levels", "host", "--overlay",
			"v")},
		{ExitFailed, "there is no such device", append(rps, "--uplink", "none0", "--levels", "host")},
		{ExitFailed, "is not online", append(rps, "--uplink", "lo", "--levels", "host", "--cpus", "8191")},
		{ExitUsage, "wrong number of arguments", []string{"steering", "reset", "eth0"}},
		{ExitUsage, "--steering-levels: level container has no effect on endpoints of Pilaster", []string{
			"agent", "--orchestrator", "https://[::1]:1", "--uplink", "lo", "--steering-levels", "container"}},
	} {
		refused(t, c.code, c.want, c.args...)
	}
	if _, err := os.Stat(filepath.Join(dir, "steering", "record.json")); err == nil {
		t.Error("a refused command has written a record")
	}
	t.Setenv("PILASTER_RUN_DIR", filepath.Join(dir, "none"))
	prints(t, "no steering was set\n", "steering", "reset")
}
