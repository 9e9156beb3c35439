package chaos_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// process is a daemon on a host, with a supervisor that restarts it.
type process struct {
	host *host
	argv []string
	env  string
	log  string

	mu   sync.Mutex
	cmd  *exec.Cmd     // nil while it does not run
	hold chan struct{} // if not nil, the supervisor restarts the process only when this is closed
	end  bool
	wait sync.WaitGroup
}

// restartAfter is the delay of a restart, so that a process that cannot start does not spin.
const restartAfter = 100 * time.Millisecond

func (p *process) keep(t *testing.T) {
	p.wait.Go(func() {
		for p.once(t) {
			time.Sleep(restartAfter)
		}
	})
	t.Cleanup(func() {
		p.mu.Lock()
		p.end = true
		if p.hold != nil {
			close(p.hold)
			p.hold = nil
		}
		if p.cmd != nil {
			p.cmd.Process.Kill()
		}
		p.mu.Unlock()
		p.wait.Wait()
		if t.Failed() {
			t.Logf("end of the log of %s:\n%s", p.host.name, tail(p.log))
		}
	})
}

// once runs the process until it ends, and reports whether to restart it.
func (p *process) once(t *testing.T) bool {
	p.mu.Lock()
	hold := p.hold
	p.mu.Unlock()
	if hold != nil {
		<-hold
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Error(err)
		return false
	}
	defer log.Close()
	cmd := exec.Command(p.argv[0], p.argv[1:]...)
	cmd.Env = append(os.Environ(), p.env)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.mu.Lock()
	if p.end {
		p.mu.Unlock()
		return false
	}
	err = p.host.start(cmd)
	p.cmd = cmd
	p.mu.Unlock()
	if err != nil {
		t.Error(err)
		return false
	}
	cmd.Wait() // ignore the error: a fault has killed the process
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd = nil
	return !p.end
}

func (h *host) start(cmd *exec.Cmd) error {
	done := make(chan error)
	h.work <- func() { done <- cmd.Start() }
	return <-done
}

// kill kills the process; the supervisor restarts it only after revive. kill reports whether the process was running.
func (p *process) kill() (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold = make(chan struct{})
	return p.signal(syscall.SIGKILL)
}

func (p *process) revive() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hold != nil {
		close(p.hold)
		p.hold = nil
	}
}

func (p *process) stop() (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.signal(syscall.SIGSTOP)
}

func (p *process) resume() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.signal(syscall.SIGCONT)
	return err
}

func (p *process) signal(s syscall.Signal) (bool, error) {
	if p.cmd == nil {
		return false, nil
	}
	err := p.cmd.Process.Signal(s)
	return err == nil, err
}

func tail(path string) string {
	b, _ := os.ReadFile(path)
	return string(b[max(0, len(b)-2000):])
}

const (
	members       = 3
	orchestrators = 2
	clientPort    = 2379
	peerPort      = 2380
	nodePort      = 7070
)

// startEtcd starts an etcd cluster. A killed member keeps its data.
func startEtcd(t *testing.T, n *network) (all []*process) {
	var hosts []*host
	var cluster []string
	for i := range members {
		h := n.host(fmt.Sprint("etcd", i+1), 1+i, storeSide)
		hosts = append(hosts, h)
		cluster = append(cluster, h.name+"="+h.endpoint("http", storeSide, peerPort))
	}
	dir := t.TempDir()
	for _, h := range hosts {
		client, peer := h.endpoint("http", storeSide, clientPort), h.endpoint("http", storeSide, peerPort)
		p := &process{host: h, log: filepath.Join(dir, h.name+".log"), argv: []string{
			"/usr/bin/etcd", "--name", h.name, "--data-dir", filepath.Join(dir, h.name),
			"--listen-client-urls", client + ",http://127.0.0.1:2379", "--advertise-client-urls", client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(cluster, ","), "--initial-cluster-token", "chaos",
		}}
		p.keep(t)
		all = append(all, p)
	}
	return all
}

func endpoints(etcd []*process) (all []string) {
	for _, p := range etcd {
		all = append(all, p.host.endpoint("http", storeSide, clientPort))
	}
	return all
}

// startOrchestrators returns the orchestrators, and how clients reach them.
func startOrchestrators(t *testing.T, n *network, etcd []*process) (all []*process, where []place) {
	for i := range orchestrators {
		h := n.host(fmt.Sprint("orch", i+1), 10+i, storeSide, nodeSide)
		dir := t.TempDir()
		c := orchestrator.Config{
			DataDir: filepath.Join(dir, "data"), RunDir: filepath.Join(dir, "run"),
			Listen: fmt.Sprintf("[%s]:%d", h.address(nodeSide), nodePort),
			Etcd:   store.External{Endpoints: endpoints(etcd)},
		}
		text, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		p := &process{host: h, log: filepath.Join(dir, "log"), argv: []string{os.Args[0]}, env: asOrchestrator + "=" +
			string(text)}
		p.keep(t)
		all = append(all, p)
		where = append(where, place{URL: h.endpoint("https", nodeSide, nodePort), RunDir: c.RunDir,
			TokenFile: filepath.Join(c.DataDir, "join-token")})
	}
	return all, where
}
