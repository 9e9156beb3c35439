package daemon

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/statefile"
)

// StaleState is what an agent that does not run has left on disk. Until it is closed, no agent can start there.
type StaleState struct {
	Prefix    netip.Prefix         // of the node; zero if unknown
	Egress    netip.Prefix         // of its egress addresses; zero if they are in Prefix
	Endpoints []string             // endpoints without a DEL, as operators name them
	Files     []network.StaleState // in the order in which they can be removed
	lock      *os.File
}

// FindStaleState lists the state and changes nothing. It fails if an agent runs. before lists the state that networks
// have left; it is removed first and may be in the same folders.
func FindStaleState(stateDir, runDir string, before []network.StaleState) (_ *StaleState, err error) {
	socket := filepath.Join(runDir, agentSocket)
	if c, err := net.DialTimeout("unix", socket, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("an agent runs: it answers on %s\n  nothing was changed; stop it first", socket)
	}
	r := &StaleState{}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	left, err := find(stateDir, state.IsState, before)
	if err != nil {
		return nil, err
	}
	if len(left) > 0 {
		if err := r.read(stateDir); err != nil {
			return nil, err
		}
		// Again, now with the lock file.
		if left, err = find(stateDir, state.IsState, before); err != nil {
			return nil, err
		}
	}
	run, err := find(
		runDir,
		func(name string) bool { return name == agentSocket || name == state.InstanceFile },
		before,
	)
	r.Files = append(run, left...)
	return r, err
}

// find lists our files in a folder, and the folder itself if it contains nothing else except what before lists: an
// orchestrator's socket and data may be in it.
func find(dir string, ours func(name string) bool, before []network.StaleState) ([]network.StaleState, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []network.StaleState
	entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool {
		return slices.ContainsFunc(
			before,
			func(l network.StaleState) bool { return l.Name == filepath.Join(dir, e.Name()) },
		)
	})
	for _, e := range entries {
		if ours(e.Name()) {
			all = append(all, leftAt(filepath.Join(dir, e.Name()), e.IsDir()))
		}
	}
	if len(all) == len(entries) {
		all = append(all, network.StaleState{Kind: "folder", Name: dir, Remove: func() error { return os.Remove(dir) }})
	}
	return all, nil
}

func leftAt(path string, folder bool) network.StaleState {
	if folder {
		return network.StaleState{Kind: "folder", Name: path, Remove: func() error { return os.RemoveAll(path) }}
	}
	return network.StaleState{Kind: "file", Name: path, Remove: func() error { return os.Remove(path) }}
}

// read takes the lock and reads as much as possible: a reset must also work with damaged files.
func (r *StaleState) read(stateDir string) (err error) {
	if r.lock, err = statefile.Lock(stateDir); err != nil {
		return err
	}
	if m, joined := state.Peek(stateDir); joined {
		r.Prefix = m.Prefix
		if egress, ok := m.Plan.EgressNode(r.Prefix); ok && egress != r.Prefix {
			r.Egress = egress
		}
	}
	for path, record := range endpoint.Peek(stateDir) {
		if record == nil {
			r.Endpoints = append(r.Endpoints, "the one in "+path+", which is unreadable")
			continue
		}
		name := "container " + record.ContainerID
		if record.Pod != "" {
			name = "pod " + record.Pod
		}
		r.Endpoints = append(r.Endpoints, strings.Join([]string{name, record.Interface}, " "))
	}
	slices.Sort(r.Endpoints)
	return nil
}

// Close allows agents to start again.
func (r *StaleState) Close() error {
	if r.lock == nil {
		return nil
	}
	return r.lock.Close()
}
