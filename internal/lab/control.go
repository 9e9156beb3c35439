package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/unixrpc"
)

// answerTime bounds how long a daemon may take to become ready or to end.
const answerTime = 60 * time.Second

// control is a client of a lab's supervisor.
type control struct{ client *http.Client }

func newControl(f folder) control { return control{unixrpc.Client(f.control())} }

func (c control) list(ctx context.Context) ([]ProcessState, error) {
	var states []ProcessState
	return states, c.do(ctx, http.MethodGet, "", nil, &states)
}

// start returns when the process is ready.
func (c control) start(ctx context.Context, p Process) (ProcessState, error) {
	var state ProcessState
	return state, c.do(ctx, http.MethodPut, "/"+p.Name, p, &state)
}

// stop returns when the process has ended. With kill, the supervisor sends SIGKILL instead of SIGTERM.
func (c control) stop(ctx context.Context, name string, kill bool) error {
	return c.do(ctx, http.MethodDelete, fmt.Sprintf("/%s?kill=%t", name, kill), nil, nil)
}

// awaitRestart waits until the process has another pid than not and is ready. If started is true, it does not wait
// until the process is ready.
func (c control) awaitRestart(ctx context.Context, name string, not int, started bool) (ProcessState, error) {
	var state ProcessState
	return state, c.do(ctx, http.MethodGet, fmt.Sprintf("/%s?not=%d&started=%t", name, not, started), nil, &state)
}

func (c control) do(ctx context.Context, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, method, unixrpc.URL+"/processes"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := c.client.Do(request)
	if err != nil {
		return fmt.Errorf("call the lab's supervisor: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1<<16))
		return errors.New(strings.TrimSpace(string(text)))
	}
	if out == nil {
		return nil
	}
	return json.NewDecoder(response.Body).Decode(out)
}

// startSupervisor starts the supervisor of a lab and waits until it serves. The supervisor survives this process.
func startSupervisor(ctx context.Context, f folder, binary string) error {
	ready := make(chan struct{}, 1)
	notify, err := listenNotify(f.path("supervisor.notify"), func() { ready <- struct{}{} })
	if err != nil {
		return fmt.Errorf("start supervisor: %w", err)
	}
	defer notify.Close()
	log, err := os.OpenFile(f.log("supervisor"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start supervisor: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(binary, "lab", "supervise", string(f))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+notify.path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C at a terminal does not reach the supervisor
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start supervisor: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // reaps the supervisor if it ends before this process
	select {
	case <-ready:
		return nil
	case err := <-ended:
		return fmt.Errorf("supervisor did not start: %w\n%s", err, tail(f.log("supervisor"), 2000))
	case <-ctx.Done():
		// lab down finds a supervisor by its lock, which this one may not hold yet. It has started no daemon.
		_ = cmd.Process.Kill() // fails only if it has ended
		<-ended
		return fmt.Errorf("start supervisor: %w", context.Cause(ctx))
	}
}

// supervisorPID returns the process that holds the lab's lock, or 0 if no process holds it.
func supervisorPID(f folder) (int, error) {
	lock, err := os.Open(f.lock())
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer lock.Close()
	holder := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(lock.Fd(), unix.F_GETLK, &holder); err != nil {
		return 0, fmt.Errorf("find the supervisor of %s: %w", f, err)
	}
	if holder.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(holder.Pid), nil
}
