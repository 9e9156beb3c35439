package traffic

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"time"

	"github.com/bradfitz/gomemcache/memcache"
	"golang.org/x/sys/unix"
)

// Memcached returns the metric of an application that sends small requests: a memcached server and a client library.
// Size of values and share of writes are the defaults of memtier_benchmark.
func Memcached() Metric {
	return Metric{
		Name:    "MEMCACHED",
		About:   "memcached on one connection, ten reads and one write in turn, values of 32 bytes",
		Unit:    "1/s",
		Figure:  "ONCache's talk, slide 26: latency 22.71 % less, 27.83 % more transactions than the overlay network",
		Traffic: caching,
		kind:    unix.SOCK_STREAM,
		block:   32,
		flows:   1,
		Counted: "transaction",
		Value:   perSecond,
		Lacks:   memcachedMissing,
	}
}

const (
	memcachedProgram = "memcached"
	memcachedPort    = 11211
	memcachedKey     = "pilaster"
	readsPerWrite    = 10
	listens          = "listens" // the server's word to the client
	// memcachedTimeout bounds the start of memcached, which takes long on a busy machine.
	memcachedTimeout = 3 * DialTimeout
)

func memcachedMissing() error {
	if _, err := exec.LookPath(memcachedProgram); err != nil {
		return fmt.Errorf("%w; install memcached (Debian: memcached), or choose metrics without it", err)
	}
	return nil
}

// caching: a memcached serves, and a client library reads and writes one value. The generators' own connection says
// when memcached listens, and when the client is done.
var caching = traffic{Serve: serveMemcached, drive: driveMemcached}

func serveMemcached(listening Socket, m Metric) (a Answer, err error) {
	bound, err := unix.Getsockname(int(listening))
	if err != nil {
		return a, err
	}
	client, err := listening.accept(m.kind)
	if err != nil {
		return a, err
	}
	defer client.close()
	runtime.LockOSThread() // the kernel ends memcached when the thread that started it ends
	at := netip.AddrPortFrom(netip.AddrFrom16(bound.(*unix.SockaddrInet6).Addr).Unmap(), memcachedPort)
	stop, err := startMemcached(at)
	if err != nil {
		_, told := client.write([]byte(err.Error()))
		return a, errors.Join(err, told)
	}
	defer stop()
	if _, err := client.write([]byte(listens)); err != nil {
		return a, err
	}
	if err := client.Wait(0); err != nil { // for as long as the client measures
		return a, err
	}
	_, err = client.read(make([]byte, 1))
	return a, err
}

// startMemcached starts a memcached, which inherits namespace and CPU, and waits until it listens.
func startMemcached(at netip.AddrPort) (stop func(), err error) {
	address := at.Addr().String()
	if at.Addr().Is6() {
		address = "[" + address + "]"
	}
	c := exec.Command(memcachedProgram, "-l", address, "-p", strconv.Itoa(int(at.Port())), "-U", "0", "-u", "root",
		"-t", "1", "-m", "64")
	c.Stderr = os.Stderr
	c.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := c.Start(); err != nil {
		return nil, fmt.Errorf("start memcached: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	stop = func() {
		c.Process.Kill()
		<-ended
	}
	deadline := time.After(memcachedTimeout)
	for {
		if err = tryConnect(at); err == nil {
			return stop, nil
		}
		select {
		case is := <-ended:
			return nil, fmt.Errorf("memcached at %v ended before it listened: %v", at, is)
		case <-deadline:
			stop()
			return nil, fmt.Errorf("memcached does not listen at %v after %v: %w", at, memcachedTimeout, err)
		case <-time.After(time.Millisecond):
		}
	}
}

func tryConnect(to netip.AddrPort) error {
	s, err := newSocket(unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer s.close()
	return s.connect(rawSockaddr(to))
}

func driveMemcached(c *client) (a Answer, err error) {
	server, err := c.dial()
	if err != nil {
		return a, err
	}
	defer server.close()
	if err := server.Wait(memcachedTimeout); err != nil {
		return a, err
	}
	said := make([]byte, 1024)
	n, err := server.read(said)
	if err != nil {
		return a, fmt.Errorf("wait for memcached: %w", err)
	}
	if string(said[:n]) != listens {
		return a, fmt.Errorf("the server did not start: %q", said[:n])
	}
	m := memcache.New(netip.AddrPortFrom(c.Target.Addr(), memcachedPort).String())
	m.Timeout = DialTimeout
	defer m.Close()
	write := func() error {
		return m.Set(&memcache.Item{Key: memcachedKey, Value: make([]byte, c.metric.block)})
	}
	if err := write(); err != nil {
		return a, fmt.Errorf("write: %w", err)
	}
	done := 0
	return c.measure(func() (float64, error) {
		if done++; done%(readsPerWrite+1) == 0 {
			return 1, write()
		}
		got, err := m.Get(memcachedKey)
		if err == nil && len(got.Value) != c.metric.block {
			err = fmt.Errorf("read a value of %d bytes, want %d", len(got.Value), c.metric.block)
		}
		return 1, err
	}, func() {})
}
