package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/sdnotify"
)

// Process is a daemon that the supervisor keeps running.
type Process struct {
	Name  string   `json:"name"`
	Argv  []string `json:"argv"`
	Netns string   `json:"netns"` // path of its namespace
	Log   string   `json:"log"`   // the supervisor appends its output to this file
}

// ProcessState is the state of a process.
type ProcessState struct {
	Name     string `json:"name"`
	PID      int    `json:"pid"`   // 0 until its next restart
	Ready    bool   `json:"ready"` // reported by sd_notify
	Restarts int    `json:"restarts"`
	LastExit string `json:"lastExit,omitempty"`
}

// The supervisor restarts an ended process after firstBackoff, and doubles the delay up to maxBackoff. A process that
// became ready, or ran for steady, resets the delay. The supervisor kills a process that does not end within killAfter
// after SIGTERM.
const (
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 5 * time.Second
	steady       = 10 * time.Second
	killAfter    = 10 * time.Second
)

// runner runs one process until it is stopped.
type runner struct {
	process Process
	folder  string // for the notify socket
	log     *slog.Logger
	stop    context.CancelFunc
	done    chan struct{} // closed when the process has ended and is not restarted

	mu         sync.Mutex
	state      ProcessState
	changed    chan struct{}  // closed and replaced at each change of state
	stopSignal syscall.Signal // signal that ends the process on stop
}

func keep(ctx context.Context, folder string, p Process, log *slog.Logger) *runner {
	ctx, stop := context.WithCancel(ctx)
	k := &runner{
		process: p, folder: folder, log: log.With("process", p.Name), stop: stop,
		done: make(
			chan struct{},
		), state: ProcessState{Name: p.Name}, changed: make(chan struct{}), stopSignal: syscall.SIGTERM,
	}
	go func() {
		defer close(k.done)
		k.run(ctx)
	}()
	return k
}

func (k *runner) run(ctx context.Context) {
	backoff := firstBackoff
	for {
		started := time.Now()
		err := k.once(ctx)
		if ctx.Err() != nil {
			k.update(func(s *ProcessState) { s.PID, s.Ready = 0, false })
			return
		}
		if last, _ := k.current(); last.Ready || time.Since(started) > steady {
			backoff = firstBackoff
		}
		exit := "exit status 0"
		if err != nil {
			exit = err.Error()
		}
		k.log.Warn("process ended", "exit", exit, "restart_in", backoff)
		k.update(func(s *ProcessState) { s.PID, s.Ready, s.Restarts, s.LastExit = 0, false, s.Restarts+1, exit })
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// once runs the process until it ends.
func (k *runner) once(ctx context.Context) error {
	ns, err := netns.Open(k.process.Netns)
	if err != nil {
		return err
	}
	defer ns.Close()
	log, err := os.OpenFile(k.process.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	// The notify socket needs a path: abstract names belong to a network namespace.
	notify, err := listenNotify(filepath.Join(k.folder, k.process.Name+".notify"), func() {
		k.update(func(s *ProcessState) { s.Ready = true })
	})
	if err != nil {
		return err
	}
	defer notify.Close()

	cmd := exec.CommandContext(ctx, k.process.Argv[0], k.process.Argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+notify.path)
	cmd.Cancel = func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		return cmd.Process.Signal(k.stopSignal)
	}
	cmd.WaitDelay = killAfter
	if err := ns.Start(cmd); err != nil {
		return err
	}
	k.log.Info("process started", "pid", cmd.Process.Pid)
	k.update(func(s *ProcessState) { s.PID = cmd.Process.Pid })
	return cmd.Wait()
}

func (k *runner) update(change func(*ProcessState)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change(&k.state)
	close(k.changed)
	k.changed = make(chan struct{})
}

func (k *runner) current() (ProcessState, <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state, k.changed
}

// await waits until wanted accepts the state.
func (k *runner) await(ctx context.Context, wanted func(ProcessState) bool) (ProcessState, error) {
	for {
		s, changed := k.current()
		if wanted(s) {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return s, fmt.Errorf("%s: %w", k.process.Name, context.Cause(ctx))
		case <-k.done:
			return s, fmt.Errorf("%s was stopped", k.process.Name)
		case <-changed:
		}
	}
}

// notifySocket receives the ready message of one process.
type notifySocket struct {
	*net.UnixConn
	path string
	done chan struct{}
}

func listenNotify(path string, ready func()) (*notifySocket, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, err
	}
	s := &notifySocket{conn, path, make(chan struct{})}
	go func() {
		defer close(s.done)
		b := make([]byte, 4096)
		for {
			n, err := conn.Read(b)
			if err != nil {
				return
			}
			for line := range strings.Lines(string(b[:n])) {
				if strings.TrimSpace(line) == sdnotify.Ready {
					ready()
				}
			}
		}
	}()
	return s, nil
}

func (s *notifySocket) Close() error {
	err := s.UnixConn.Close()
	<-s.done
	return errors.Join(err, os.Remove(s.path))
}

// tail returns the end of a log file, for an error message.
func tail(path string, bytes int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, size-bytes), io.SeekStart)
	}
	b, _ := io.ReadAll(f)
	return strings.TrimSpace(string(b))
}
