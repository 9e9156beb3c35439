package agent

import (
	"os"
	"path/filepath"

	"pilaster.io/pilaster/internal/join"
)

// instanceFile is its name in the run directory.
const instanceFile = "instance"

// instance names this machine to the orchestrator, until it boots. An agent that takes over from one that was killed
// goes by the same name, and is let in though the orchestrator has not noticed the end of the stream before. It must
// not come with a copy of the disk: hence the run directory, which is in memory.
func instance(runDir string) (string, error) {
	path := filepath.Join(runDir, instanceFile)
	if held, err := os.ReadFile(path); err == nil && join.IsUUID(string(held)) {
		return string(held), nil
	}
	fresh := join.NewUUID()
	return fresh, os.WriteFile(path, []byte(fresh), 0o600)
}
