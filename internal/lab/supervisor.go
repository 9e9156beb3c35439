package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
	"pilaster.io/pilaster/internal/sdnotify"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Supervise is the supervisor process of the lab in dir: it keeps the requested processes running until ctx ends, then
// stops them. It serves on a Unix socket:
//
//	GET    /processes                 all states
//	GET    /processes/NAME?not=PID    the state, once the process is ready under another pid;
//	                                  with &started=true once it runs under another pid
//	PUT    /processes/NAME            start it; responds when it is ready
//	DELETE /processes/NAME            stop it; responds when it has ended;
//	                                  with ?kill=true by SIGKILL
func Supervise(ctx context.Context, dir string, log *slog.Logger) error {
	f := folder(dir)
	lock, err := os.OpenFile(f.lock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("supervise: %w", err)
	}
	defer lock.Close()
	// The holder of the lock is the supervisor. This descriptor must stay open: a POSIX lock is released when the
	// process closes any descriptor of the file.
	if err := unix.FcntlFlock(lock.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		return fmt.Errorf("supervise %s: another supervisor runs: %w", dir, err)
	}
	if err := os.MkdirAll(f.path("notify"), 0o700); err != nil {
		return err
	}
	listener, err := unixrpc.Listen(f.control())
	if err != nil {
		return fmt.Errorf("supervise: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s := &supervisor{ctx: ctx, folder: f, log: log, runners: map[string]*runner{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /processes", s.list)
	mux.HandleFunc("GET /processes/{name}", s.await)
	mux.HandleFunc("PUT /processes/{name}", s.start)
	mux.HandleFunc("DELETE /processes/{name}", s.stopOne)
	server := unixrpc.Server(mux)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if err := sdnotify.Notify(sdnotify.Ready); err != nil {
		log.Warn("cannot notify readiness", "error", err)
	}
	select {
	case <-ctx.Done():
		err = nil
	case err = <-served:
	}
	stop()
	s.wait()
	return errors.Join(err, server.Close())
}

type supervisor struct {
	ctx    context.Context // of the process; outlives each request
	folder folder
	log    *slog.Logger

	mu      sync.Mutex
	runners map[string]*runner
}

func (s *supervisor) runner(name string) *runner {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.runners[name]
}

func (s *supervisor) list(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	states := make([]ProcessState, 0, len(s.runners))
	for _, k := range s.runners {
		state, _ := k.current()
		states = append(states, state)
	}
	s.mu.Unlock()
	answer(w, states)
}

func (s *supervisor) await(w http.ResponseWriter, r *http.Request) {
	k := s.runner(r.PathValue("name"))
	if k == nil {
		http.Error(w, "no such process", http.StatusNotFound)
		return
	}
	not, _ := strconv.Atoi(r.URL.Query().Get("not"))
	started := r.URL.Query().Get("started") == "true"
	state, err := k.await(
		r.Context(),
		func(p ProcessState) bool { return p.PID != 0 && p.PID != not && (p.Ready || started) },
	)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	answer(w, state)
}

func (s *supervisor) start(w http.ResponseWriter, r *http.Request) {
	var p Process
	if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&p); err != nil || len(p.Argv) == 0 ||
		p.Name != r.PathValue("name") {
		http.Error(w, "invalid process", http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	if s.runners[p.Name] != nil || s.ctx.Err() != nil {
		s.mu.Unlock()
		http.Error(w, p.Name+" is already running", http.StatusConflict)
		return
	}
	k := keep(s.ctx, s.folder.path("notify"), p, s.log)
	s.runners[p.Name] = k
	s.mu.Unlock()

	state, err := k.await(r.Context(), func(p ProcessState) bool { return p.Ready || p.Restarts > 0 })
	if err == nil && state.Restarts > 0 {
		err = fmt.Errorf("%s did not start: %s\n%s", p.Name, state.LastExit, tail(p.Log, 2000))
	}
	if err != nil {
		s.stop(k)
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	answer(w, state)
}

func (s *supervisor) stopOne(w http.ResponseWriter, r *http.Request) {
	if k := s.runner(r.PathValue("name")); k != nil {
		if r.URL.Query().Get("kill") == "true" {
			k.mu.Lock()
			k.stopSignal = syscall.SIGKILL
			k.mu.Unlock()
		}
		s.stop(k)
	}
	w.WriteHeader(http.StatusNoContent)
}

// stop stops a process and waits until it has ended.
func (s *supervisor) stop(k *runner) {
	k.stop()
	<-k.done
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.runners, k.process.Name)
}

// wait waits until all processes have ended; their context is already cancelled.
func (s *supervisor) wait() {
	s.mu.Lock()
	all := make([]*runner, 0, len(s.runners))
	for _, k := range s.runners {
		all = append(all, k)
	}
	s.mu.Unlock()
	for _, k := range all {
		<-k.done
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // an error means that the client is gone
}

// RunOVS is the process of a node's Open vSwitch. It starts the two daemons. When one daemon ends, RunOVS ends the
// other daemon and returns.
func RunOVS(ctx context.Context, dir string) error {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	daemons, err := ovs.Start(ctx, ns, dir)
	if err != nil {
		return err
	}
	if err = sdnotify.Notify(sdnotify.Ready); err == nil {
		err = daemons.Wait(ctx)
	}
	return errors.Join(err, daemons.Stop())
}

// Pause is the only process of a container, like Kubernetes' pause: it reports readiness and waits.
func Pause(ctx context.Context) error {
	if err := sdnotify.Notify(sdnotify.Ready); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
