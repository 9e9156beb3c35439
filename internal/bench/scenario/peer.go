package scenario

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/netns"
)

// peerTimeout bounds how long a peer may take to set up or remove its network.
const peerTimeout = 2 * time.Minute

// Peer returns a scenario that a command builds. With the argument "up", the command connects two containers on two of
// our nodes by any network. With "down", it removes that network. See docs/howto/benchmark-peer.md.
func Peer(name, command string) Scenario {
	return Scenario{Name: name, About: "as " + command + " builds it", Build: func(w *Wire) (Pair, error) {
		p, env, err := w.vacant()
		if err != nil {
			return p, err
		}
		w.OnClose(func() error { _, err := runPeer(command, "down", env); return err })
		said, err := runPeer(command, "up", env)
		if err != nil {
			return p, err
		}
		lines := strings.Split(strings.TrimSpace(string(said)), "\n")
		last := strings.TrimSpace(lines[len(lines)-1])
		if err := p.aim(last); err != nil {
			return p, fmt.Errorf("%s up: the last line it printed is %q: %w", command, last, err)
		}
		return p, nil
	}}
}

// aim reads the server's address, or the address and port that the server listens on, and those that the client
// connects to.
func (p *Pair) aim(line string) (err error) {
	listens, target, both := strings.Cut(line, " ")
	if !both {
		if p.Target, err = netip.ParseAddr(line); err != nil {
			return errors.New("not the server's address")
		}
		return nil
	}
	server, err1 := netip.ParseAddrPort(listens)
	to, err2 := netip.ParseAddrPort(target)
	if err1 != nil || err2 != nil || server.Port() == 0 {
		return errors.New("not the server's [ADDRESS]:PORT and that of the client's target")
	}
	p.Target, p.Port = server.Addr(), server.Port()
	p.Expose = func(uint16) (netip.AddrPort, error) { return to, nil }
	return nil
}

// vacant creates a pair of containers without a network, and the environment of the peer's command.
func (w *Wire) vacant() (p Pair, env []string, err error) {
	folder := filepath.Join(w.Dir, "peer")
	if err := os.Mkdir(folder, 0o700); err != nil {
		return p, nil, err
	}
	env = []string{"BENCH_DIR=" + folder, "BENCH_UPLINK=eth0"}
	var ends [2]*netns.Namespace
	for i, n := range w.Nodes {
		if ends[i], err = w.Namespace(n.name + "-container"); err != nil {
			return p, nil, err
		}
		for name, value := range map[string]string{
			"NODE": n.NS.Path(), "CONTAINER": ends[i].Path(), "ADDRESS": n.Underlay.String(),
			"ADDRESS4": n.Underlay4.String(),
		} {
			env = append(env, fmt.Sprintf("BENCH_%s_%d=%s", name, i+1, value))
		}
	}
	return Pair{Client: ends[0], Server: ends[1]}, env, nil
}

// runPeer runs the command and returns its output.
func runPeer(command, verb string, env []string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), peerTimeout)
	defer cancel()
	c := exec.CommandContext(ctx, command, verb)
	c.Env = append(os.Environ(), env...)
	// Write the output to a file, because processes that the command leaves running would keep a pipe open.
	out, err := os.CreateTemp("", "peer")
	if err != nil {
		return nil, err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	errs, err := os.CreateTemp("", "peer")
	if err != nil {
		return nil, err
	}
	defer os.Remove(errs.Name())
	defer errs.Close()
	c.Stdout, c.Stderr = out, errs
	failed := c.Run()
	said, err1 := os.ReadFile(out.Name())
	why, err2 := os.ReadFile(errs.Name())
	if failed != nil {
		failed = fmt.Errorf("%s %s: %w: %s", command, verb, failed, bytes.TrimSpace(why))
	}
	return said, errors.Join(failed, err1, err2)
}
