package state

import (
	"os"
	"path/filepath"

	"pilaster.io/pilaster/internal/join"
)

// InstanceFile is its name in the run directory.
const InstanceFile = "instance"

// Instance returns an identifier of this machine that lasts until it boots. An agent that replaces a killed one uses
// the same identifier, so the orchestrator accepts it before it has noticed the end of the previous stream. The
// identifier must not be copied with the disk; therefore it is in the run directory, which is in memory.
func Instance(runDir string) (string, error) {
	path := filepath.Join(runDir, InstanceFile)
	if held, err := os.ReadFile(path); err == nil && join.IsUUID(string(held)) {
		return string(held), nil
	}
	fresh := join.NewUUID()
	return fresh, os.WriteFile(path, []byte(fresh), 0o600)
}
