package accelerate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/oncache"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Paths of the socket.
const (
	pathStatus = "/status"
	pathPause  = "/pause"
	pathResume = "/resume"
	pathEvict  = "/evict"
	pathReset  = "/reset"
)

// EvictRequest says which entries to evict. One of the fields is set.
type EvictRequest struct {
	All       bool       `json:"all,omitempty"`
	Address   netip.Addr `json:"address,omitzero"`    // of a container
	VTEP      netip.Addr `json:"vtep,omitzero"`       // of another node
	Container string     `json:"container,omitempty"` // device of a container here
}

// Evicted is the answer of evict.
type Evicted struct {
	Entries int `json:"entries"`
}

// Undone is the answer of reset.
type Undone struct {
	Settings []Setting `json:"settings"` // restored ones
}

// server serves the socket and the metrics.
type server struct {
	servers []*http.Server
	done    sync.WaitGroup
}

func (d *daemon) serve(ctx context.Context) (*server, error) {
	socket, err := unixrpc.Listen(d.Socket)
	if err != nil {
		return nil, err
	}
	s := &server{}
	observed := d.observe(ctx)
	mux := http.NewServeMux()
	mux.Handle("/", observed)
	handle := func(method, path string, run func(r *http.Request) (any, error)) {
		mux.HandleFunc(method+" "+path, func(w http.ResponseWriter, r *http.Request) {
			var answer any
			err := d.call(ctx, r.Context(), func() (err error) { answer, err = run(r); return err })
			reply(w, answer, err)
		})
	}
	handle(http.MethodGet, pathStatus, func(*http.Request) (any, error) { return d.status() })
	handle(http.MethodPost, pathPause, func(*http.Request) (any, error) { return d.setPaused(true) })
	handle(http.MethodPost, pathResume, func(*http.Request) (any, error) { return d.setPaused(false) })
	handle(http.MethodPost, pathEvict, d.evictRequest)
	handle(http.MethodPost, pathReset, func(*http.Request) (any, error) { return d.reset() })
	s.run(unixrpc.Server(mux), socket)
	if d.MetricsListen == "" {
		return s, nil
	}
	l, err := net.Listen("tcp", d.MetricsListen)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--metrics-listen: %w", err), s.close())
	}
	s.run(&http.Server{Handler: observed, ReadHeaderTimeout: 5 * time.Second}, l)
	return s, nil
}

func (s *server) run(one *http.Server, l net.Listener) {
	s.servers = append(s.servers, one)
	s.done.Go(func() { _ = one.Serve(l) }) // ends with ErrServerClosed
}

// close lets calls end, at most for a short time.
func (s *server) close() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	for _, one := range s.servers {
		if one.Shutdown(ctx) != nil {
			err = errors.Join(err, one.Close())
		}
	}
	s.done.Wait()
	return err
}

// locks is the folder of the lock files. Only root may create a file in it, and open one.
const locks = "/run/pilaster"

// claim is the lock of a network namespace's overlay. The kernel frees it when the process ends.
type claim struct{ *os.File }

// claimOverlay keeps a second daemon of the network namespace, with whatever socket, from accelerating the same
// overlay.
func claimOverlay(device, socket string) (io.Closer, error) {
	var ns unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &ns); err != nil {
		return nil, fmt.Errorf("network namespace: %w", err)
	}
	if err := os.MkdirAll(locks, 0o755); err != nil {
		return nil, fmt.Errorf("lock %s: %w; nothing was changed", device, err)
	}
	path := filepath.Join(locks, fmt.Sprintf("accelerate-%d-%s.lock", ns.Ino, device))
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w; nothing was changed", device, err)
		}
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case errors.Is(err, unix.EWOULDBLOCK):
			holder, _ := io.ReadAll(io.LimitReader(f, 1000)) // empty if it has not written it yet
			return nil, errors.Join(fmt.Errorf("another daemon in this network namespace accelerates %s already (%s); "+
				"nothing was changed: stop it first, with `pilaster accelerate reset` and its --socket", device,
				cmp.Or(string(holder), path+" is locked")), f.Close())
		case err != nil:
			return nil, errors.Join(fmt.Errorf("lock %s: %w; nothing was changed", path, err), f.Close())
		}
		// A daemon that has just ended may have removed the file that is locked now.
		locked, err := f.Stat()
		err = errors.Join(err, f.Truncate(0))
		if now, failed := os.Lstat(path); err == nil && failed == nil && os.SameFile(locked, now) {
			_, err := f.WriteAt(fmt.Appendf(nil, "process %d, socket %s", os.Getpid(), socket), 0)
			if err != nil {
				return nil, errors.Join(fmt.Errorf("lock %s: %w; nothing was changed", path, err), claim{f}.Close())
			}
			return claim{f}, nil
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
}

// Close removes the file before it frees the lock.
func (c claim) Close() error { return errors.Join(os.Remove(c.Name()), c.File.Close()) }

// errEnding is the answer to calls while the daemon ends.
var errEnding = errors.New("the daemon is ending")

// call runs f in the loop.
func (d *daemon) call(daemon, caller context.Context, f func() error) error {
	result := make(chan error, 1)
	select {
	case d.calls <- func() { result <- f() }:
		return <-result
	case <-daemon.Done():
		return errEnding
	case <-caller.Done():
		return caller.Err()
	}
}

// refused is an error of the request, absent one of a device that does not exist.
type (
	refused struct{ error }
	absent  struct{ error }
)

func reply(w http.ResponseWriter, answer any, err error) {
	var bad refused
	var none absent
	switch {
	case errors.Is(err, errEnding):
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	case errors.As(err, &bad):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case errors.As(err, &none):
		http.Error(w, err.Error(), http.StatusNotFound)
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	default:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(answer)
	}
}

// setPaused answers after the programs have the new state.
func (d *daemon) setPaused(paused bool) (Status, error) {
	d.paused = paused
	d.settle()
	s, err := d.status()
	if err == nil && paused && s.InUse {
		err = errors.New("the cache could not be paused; it is not in use after 3 s; see the daemon's log")
	}
	return s, err
}

func (d *daemon) evictRequest(r *http.Request) (any, error) {
	var q EvictRequest
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		return nil, refused{err}
	}
	if d.cache == nil {
		return Evicted{}, nil // nothing is cached
	}
	selector := oncache.Selector{All: q.All, Inner: q.Address, VTEP: q.VTEP}
	if q.Container != "" {
		l, err := netlink.LinkByName(q.Container)
		if err != nil {
			return nil, absent{fmt.Errorf("%s: %w; nothing was evicted; `pilaster accelerate status` lists the devices",
				q.Container, err)}
		}
		selector.Device = uint32(l.Attrs().Index)
	}
	if selector == (oncache.Selector{}) {
		return nil, refused{errors.New("no entries are selected")}
	}
	n, err := d.cache.Evict(selector)
	d.evicted[causeOperator]++
	return Evicted{n}, err
}

// reset detaches the cache, restores the settings and ends the daemon.
func (d *daemon) reset() (Undone, error) {
	err := d.closeCache()
	undone, failed := restore(recordOf(d.Socket))
	if err = errors.Join(err, failed); err != nil {
		return Undone{}, err
	}
	select {
	case <-d.ended: // by another request that waited too
	default:
		close(d.ended)
	}
	return Undone{append([]Setting{}, undone...)}, nil
}
