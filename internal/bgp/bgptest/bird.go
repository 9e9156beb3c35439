package bgptest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/netns"
)

// StartBIRD starts BIRD in a network namespace with a configuration, and stops it when the test ends.
func StartBIRD(t testing.TB, ns *netns.Namespace, config string) {
	t.Helper()
	dir := t.TempDir()
	file, socket, log := filepath.Join(dir, "conf"), filepath.Join(dir, "s"), filepath.Join(dir, "log")
	text := "log \"" + log + "\" all;\n" + config
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, "bird", "-f", "-c", file, "-s", socket)
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := ns.Do(cmd.Start); err != nil {
		cancel()
		t.Fatalf("start BIRD: %v", err)
	}
	t.Cleanup(func() {
		cancel()
		cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log)
			t.Logf("BIRD: %s\n%s", said.String(), text)
		}
	})
}
