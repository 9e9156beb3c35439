package lab

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Stop stops Orchestrator, an OrchestratorOf(region) or an AgentProcess(node). The supervisor does not restart it.
func (l *Lab) Stop(ctx context.Context, process string) error {
	return l.control.stop(ctx, process, false)
}

// KillNoRestart kills a process with SIGKILL; unlike after Kill, the supervisor does not restart it.
func (l *Lab) KillNoRestart(ctx context.Context, process string) error {
	return l.control.stop(ctx, process, true)
}

// Start starts a stopped process and waits until it is ready.
func (l *Lab) Start(ctx context.Context, process string) error {
	node, isAgent := strings.CutPrefix(process, AgentProcess(""))
	switches, isSwitch := strings.CutPrefix(process, OVSProcess(""))
	nodes := l.state.Spec.AllNodes()
	switch {
	case isSwitch && slices.Contains(nodes, switches) && l.state.Spec.needsOVS(switches):
		_, err := l.control.start(ctx, l.ovsProcess(switches))
		return err
	case isAgent && slices.Contains(nodes, node):
		_, err := l.control.start(ctx, l.agentProcess(node))
		return err
	}
	if region, i, ok := l.state.Spec.at(func(r Region) bool { return r.place() == process }); ok {
		_, err := l.control.start(ctx, l.orchestratorProcess(region, i))
		return err
	}
	return fmt.Errorf("lab %s has no process %q", l.Name(), process)
}

// Kill kills a process with SIGKILL and waits until the supervisor has restarted it and it is ready. It returns the new
// pid.
func (l *Lab) Kill(ctx context.Context, process string) (int, error) {
	return l.kill(ctx, process, false)
}

// Crash kills a process like Kill, but waits only until the supervisor has restarted it, so that a test can kill the
// process again during its start.
func (l *Lab) Crash(ctx context.Context, process string) (int, error) {
	return l.kill(ctx, process, true)
}

// Await waits until a process is ready, across restarts.
func (l *Lab) Await(ctx context.Context, process string) error {
	_, err := l.control.awaitRestart(ctx, process, 0, false)
	return err
}

func (l *Lab) kill(ctx context.Context, process string, started bool) (int, error) {
	states, err := l.control.list(ctx)
	if err != nil {
		return 0, err
	}
	i := slices.IndexFunc(states, func(s ProcessState) bool { return s.Name == process && s.PID > 0 })
	if i < 0 {
		return 0, fmt.Errorf("lab %s: process %q is not running", l.Name(), process)
	}
	if err := unix.Kill(states[i].PID, unix.SIGKILL); err != nil {
		return 0, fmt.Errorf("kill %s: %w", process, err)
	}
	state, err := l.control.awaitRestart(ctx, process, states[i].PID, started)
	return state.PID, err
}

// Processes returns the states of the lab's processes.
func (l *Lab) Processes(ctx context.Context) ([]ProcessState, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return l.control.list(ctx)
}
