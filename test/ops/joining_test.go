package ops_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// TestNoOpenVSwitchIsSeenBeforeJoining: an agent that cannot start because Open vSwitch is missing registers no name
// and gets no certificate.
func TestNoOpenVSwitchIsSeenBeforeJoining(t *testing.T) {
	c, args := newCandidate(t)
	ctx := labtest.Context(t)
	state := filepath.Join(c.tmp, "state")
	var complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, labtest.Binary(t),
		append([]string{"agent", "--nimitz", "ovs", "--ovs-run-dir", c.tmp, "--bpffs", c.BPF(name), "--run-dir", c.tmp,
			"--state-dir", state}, args...)...)
	cmd.Stderr = &complaint
	status, _ := lab.ExitStatus(c.ns.Run(cmd))
	if says := "in " + c.tmp + " does not answer"; status != 1 || !strings.Contains(complaint.String(), says) ||
		!strings.Contains(complaint.String(), "nothing was changed; start Open vSwitch, or correct --ovs-run-dir") {
		t.Errorf("exit %d, want %q\n%s", status, says, &complaint)
	}
	if _, err := os.Stat(state); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the agent has a state folder: %v", err)
	}
}
