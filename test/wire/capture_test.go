package wire_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// port is a device of the router, with an injector for sentinels.
type port struct {
	name   string
	inject *packet.Injector
	// Addresses of both ends of the link, so that a sentinel is a valid packet of the fabric.
	router, far netip.Addr
}

// capture is dumpcap, the capturing part of tshark, on every port of the router.
type capture struct {
	ports  []port
	cmd    *exec.Cmd
	report bytes.Buffer  // standard error, with the final counts
	grown  chan struct{} // has an element after new output
	ended  chan struct{}

	mu     sync.Mutex
	pcapng []byte
}

// startCapture returns when it has captured a sentinel on every port.
func startCapture(ctx context.Context, t *testing.T, router *netns.Namespace, ports []port) *capture {
	t.Helper()
	c := &capture{ports: ports, grown: make(chan struct{}, 1), ended: make(chan struct{})}
	// Use buffers of 64 MB in the kernel for each port, and between dumpcap's threads.
	args := []string{"-q", "-B", "64", "-C", "64000000", "-N", "100000", "-w", "-"}
	for _, p := range ports {
		args = append(args, "-i", p.name)
	}
	c.cmd = exec.Command("dumpcap", args...)
	c.cmd.Stderr = &c.report
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := router.Start(c.cmd); err != nil {
		t.Fatal(err)
	}
	go c.read(out)
	t.Cleanup(func() { _ = c.cmd.Process.Kill() }) // already ended unless the test failed
	c.await(ctx, t)
	return c
}

func (c *capture) read(from io.Reader) {
	defer close(c.ended)
	for buffer := make([]byte, 1<<20); ; {
		n, err := from.Read(buffer)
		c.mu.Lock()
		c.pcapng = append(c.pcapng, buffer[:n]...)
		c.mu.Unlock()
		select {
		case c.grown <- struct{}{}:
		default:
		}
		if err != nil {
			return
		}
	}
}

// contains searches the capture for a sentinel, from an offset.
func (c *capture) contains(sentinel packet.Sentinel, from int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Contains(c.pcapng[from:], sentinel[:])
}

func (c *capture) size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pcapng)
}

// resend is the retry interval for a sentinel that was not captured, because dumpcap may not have started to capture.
const resend = 100 * time.Millisecond

// await sends a sentinel from every port until each was captured.
func (c *capture) await(ctx context.Context, t *testing.T) {
	t.Helper()
	again := time.NewTicker(resend)
	defer again.Stop()
	from := c.size()
	for _, p := range c.ports {
		sentinel := packet.NewSentinel()
		// No process listens on this port. The resulting ICMPv6 error is valid traffic too.
		frame := packet.Packet{Source: p.router, Destination: p.far,
			Body: packet.UDP{SourcePort: sentinelPort, DestinationPort: sentinelPort, Payload: sentinel[:]}}
		for due := true; !c.contains(sentinel, from); {
			if due {
				if err := p.inject.Send(frame.Frame(p.inject.MAC(), p.inject.MAC())); err != nil {
					t.Fatal(err)
				}
			}
			due = false
			select {
			case <-c.grown:
			case <-again.C:
				due = true
			case <-c.ended:
				t.Fatalf("dumpcap ended: %v\n%s", c.cmd.Wait(), c.report.String())
			case <-ctx.Done():
				t.Fatalf("no sentinel on port %s: %v", p.name, context.Cause(ctx))
			}
		}
	}
}

// stop returns a file with all packets of the ports so far.
func (c *capture) stop(ctx context.Context, t *testing.T) recording {
	t.Helper()
	c.await(ctx, t)
	if err := c.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	<-c.ended
	if err := c.cmd.Wait(); err != nil {
		t.Fatalf("dumpcap: %v\n%s", err, c.report.String())
	}
	// dumpcap reports one line per port. Flushed packets do not matter, because they came after the sentinel.
	for _, p := range c.ports {
		_, counts, _ := strings.Cut(c.report.String(), "on interface '"+p.name+"': ")
		if _, lost, _ := strings.Cut(counts, " "); !strings.HasPrefix(lost, "(pcap:0/dumpcap:0/") {
			t.Fatalf("dumpcap missed frames on port %s:\n%s", p.name, c.report.String())
		}
	}
	file := recording(filepath.Join(t.TempDir(), "fabric.pcapng"))
	if err := os.WriteFile(string(file), c.pcapng, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// recording is the path of a capture file for tshark.
type recording string

// frame has tshark's fields of one frame.
type frame struct {
	number, length int
	port           string
	layers         string // "eth:ethertype:ipv6:udp:data"
	source         []netip.Addr
	destination    []netip.Addr // of the packet, then of the packet quoted by an ICMPv6 error
	payload        int          // payload length in the IPv6 header
	checksum       string       // goodChecksum or badChecksum; empty without a checksum
	sum            uint64       // value of the checksum
	protocol       uint8
	icmpType       string
}

// Values of tshark's fields *.checksum.status.
const (
	badChecksum  = "0"
	goodChecksum = "1"
)

var fields = []string{
	"frame.number", "frame.len", "frame.interface_name", "frame.protocols", "ipv6.src", "ipv6.dst", "ipv6.plen",
	"tcp.checksum.status", "udp.checksum.status", "icmpv6.checksum.status", "tcp.checksum", "udp.checksum",
	"icmpv6.type",
}

func (r recording) tshark(t *testing.T, args ...string) []string {
	t.Helper()
	args = append([]string{"-n", "-r", string(r), "-o", "tcp.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE",
		"-T", "fields", "-E", "separator=|", "-E", "occurrence=a", "-E", "aggregator=,"}, args...)
	// tshark must not guess protocols from payloads or from ephemeral ports.
	for _, port := range []int{openPort, closedPort, sentinelPort} {
		args = append(args, "-d", fmt.Sprintf("udp.port==%d,data", port), "-d", fmt.Sprintf("tcp.port==%d,data", port))
	}
	out, err := exec.Command("tshark", args...).Output()
	if err != nil {
		t.Fatalf("tshark %q: %v", args, err)
	}
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}

// frames decodes every frame.
func (r recording) frames(t *testing.T) []frame {
	t.Helper()
	var args []string
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	var all []frame
	for _, line := range r.tshark(t, args...) {
		f, err := parseFrame(strings.Split(line, "|"))
		if err != nil {
			t.Fatalf("unexpected output of tshark %q: %v", line, err)
		}
		all = append(all, f)
	}
	return all
}

func parseFrame(v []string) (f frame, err error) {
	if len(v) != len(fields) {
		return f, fmt.Errorf("got %d of %d fields", len(v), len(fields))
	}
	number := func(s string) int {
		first, _, _ := strings.Cut(s, ",") // of the outermost header
		n, err2 := strconv.ParseInt(first, 0, 64)
		if first != "" && err2 != nil {
			err = err2
		}
		return int(n)
	}
	addresses := func(s string) (all []netip.Addr) {
		for a := range strings.SplitSeq(s, ",") {
			if parsed, err2 := netip.ParseAddr(a); err2 == nil {
				all = append(all, parsed)
			}
		}
		return all
	}
	f = frame{
		number: number(v[0]), length: number(v[1]), port: v[2], layers: v[3],
		source: addresses(v[4]), destination: addresses(v[5]), payload: number(v[6]),
		icmpType: v[12],
	}
	// Use only the first protocol, because an ICMPv6 error also has the headers of the quoted packet.
	for _, layer := range strings.Split(f.layers, ":") {
		switch layer {
		case "tcp":
			f.protocol, f.checksum, f.sum = packet.ProtocolTCP, v[7], uint64(number(v[10]))
		case "udp":
			f.protocol, f.checksum, f.sum = packet.ProtocolUDP, v[8], uint64(number(v[11]))
		case "icmpv6":
			f.protocol, f.checksum = packet.ProtocolICMPv6, v[9]
		default:
			continue
		}
		break
	}
	f.checksum, _, _ = strings.Cut(f.checksum, ",")
	return f, err
}

// partial reports whether the checksum covers only the pseudo header. The kernel leaves the rest to the device, and a
// veth device does not complete it.
func (f frame) partial() bool {
	if f.protocol != packet.ProtocolTCP && f.protocol != packet.ProtocolUDP {
		return false
	}
	pseudo := ^packet.Checksum(f.source[0], f.destination[0], f.protocol, make([]byte, f.payload))
	return uint64(pseudo)%0xffff == f.sum%0xffff
}

// openPorts opens the router's devices with these names.
func openPorts(t *testing.T, router *netns.Namespace, names ...string) []port {
	t.Helper()
	var ports []port
	for _, name := range names {
		inject, err := packet.NewInjector(router, name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { inject.Close() })
		p := port{name: name, inject: inject}
		err = router.Do(func() error {
			device, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			addresses, err := device.Addrs()
			for _, a := range addresses {
				if prefix, err := netip.ParsePrefix(a.String()); err == nil && prefix.Addr().IsGlobalUnicast() {
					p.router, p.far = prefix.Addr(), prefix.Addr().Next()
				}
			}
			return err
		})
		if err != nil || !p.router.IsValid() {
			t.Fatalf("read the router's address on %s: %v, %v", name, p.router, err)
		}
		ports = append(ports, p)
	}
	return ports
}
