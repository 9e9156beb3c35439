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

// Process is a daemon the supervisor keeps running.
type Process struct {
	Name  string   `json:"name"`
	Argv  []string `json:"argv"`
	Netns string   `json:"netns"` // path of the namespace it runs in
	Log   string   `json:"log"`   // file its output is appended to
}

// ProcessState is how a process is doing.
type ProcessState struct {
	Name     string `json:"name"`
	PID      int    `json:"pid"`   // 0 while it waits to be started again
	Ready    bool   `json:"ready"` // it said so (sd_notify)
	Restarts int    `json:"restarts"`
	LastExit string `json:"lastExit,omitempty"`
}

// A process that dies is started again after firstBackoff, then after twice that, and so on up to
// maxBackoff. One that became ready, or has run for steady, starts over. One that ignores SIGTERM for
// killAfter is killed.
const (
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 5 * time.Second
	steady       = 10 * time.Second
	killAfter    = 10 * time.Second
)

// keeper runs one process until it is stopped.
type keeper struct {
	process Process
	folder  string // for the notify socket
	log     *slog.Logger
	stop    context.CancelFunc
	done    chan struct{} // closed when the process is gone for good

	mu       sync.Mutex
	state    ProcessState
	changed  chan struct{}  // closed and replaced at each change of state
	farewell syscall.Signal // what stop ends the process with
}

func keep(ctx context.Context, folder string, p Process, log *slog.Logger) *keeper {
	ctx, stop := context.WithCancel(ctx)
	k := &keeper{
		process: p, folder: folder, log: log.With("process", p.Name), stop: stop,
		done: make(
			chan struct{},
		), state: ProcessState{Name: p.Name}, changed: make(chan struct{}), farewell: syscall.SIGTERM,
	}
	go func() {
		defer close(k.done)
		k.run(ctx)
	}()
	return k
}

func (k *keeper) run(ctx context.Context) {
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
		k.log.Warn("process ended", "exit", exit, "again_in", backoff)
		k.update(func(s *ProcessState) { s.PID, s.Ready, s.Restarts, s.LastExit = 0, false, s.Restarts+1, exit })
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// once runs the process one time.
func (k *keeper) once(ctx context.Context) error {
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
	// A path, not an abstract name: those do not cross namespaces.
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
		return cmd.Process.Signal(k.farewell)
	}
	cmd.WaitDelay = killAfter
	if err := ns.Start(cmd); err != nil {
		return err
	}
	k.log.Info("process started", "pid", cmd.Process.Pid)
	k.update(func(s *ProcessState) { s.PID = cmd.Process.Pid })
	return cmd.Wait()
}

func (k *keeper) update(change func(*ProcessState)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change(&k.state)
	close(k.changed)
	k.changed = make(chan struct{})
}

func (k *keeper) current() (ProcessState, <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state, k.changed
}

// await waits until the state is as wanted.
func (k *keeper) await(ctx context.Context, wanted func(ProcessState) bool) (ProcessState, error) {
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

// notifySocket is where one process says that it is ready.
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

// tail is the end of a log file, for an error message.
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
