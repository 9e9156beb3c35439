//go:build kernel_ila

package scenario

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// TestKernelILA: a container of network ila and a host with the kernel's ILA (module ila) reach each other, both ways,
// with each way of checksum-neutral mapping. `make vm-ila` runs it on a kernel that has the module.
func TestKernelILA(t *testing.T) {
	if out, err := exec.CommandContext(t.Context(), "modprobe", "ila").CombinedOutput(); err != nil {
		t.Fatalf("this kernel has no ILA: %v: %s", err, out)
	}
	for _, form := range []struct {
		mode   string
		noCBit bool
	}{{"neutral-map", false}, {"neutral-map-auto", true}} {
		t.Run(form.mode, func(t *testing.T) {
			w, err := NewWire(t.TempDir())
			must(t, err)
			defer w.Close()
			use, err := address.DefaultPlan().ILA()
			must(t, err)
			use.NoCBit = form.noCBit
			b := newKernelBed(t, w, use, form.mode)
			b.pings(t)
			b.transfers(t)
			b.checksums(t)
		})
	}
}

// kernelBed has a container on the first node of a wire; the second one is a host with the kernel's ILA.
type kernelBed struct {
	*Wire
	container    *netns.Namespace
	here, there  netip.Addr // of the container and of the host, as both see them
	wireA, wireB netip.Addr // the same on the fabric
	captured     *packet.Capture
}

func newKernelBed(t *testing.T, w *Wire, use address.ILA, mode string) *kernelBed {
	t.Helper()
	n, host := w.Nodes[0], w.Nodes[1]
	d, err := n.OpenDatapath(Variant{device: endpoint.Veth, identifiers: true})
	must(t, err)
	own, err := use.Locator(n.Prefix)
	must(t, err)
	far, err := use.Locator(host.Prefix)
	must(t, err)
	must(t, n.routeTo(far, host))
	b := &kernelBed{Wire: w, there: ilaAddress(use, 1)}
	b.container, b.here, err = n.addILA(d, ilaNode{use: use, number: 0, sourceStays: true}, host)
	must(t, err)
	b.wireA, b.wireB = use.ToWire(b.here, own), use.ToWire(b.there, far)

	// The kernel's locators are written as 4 groups of an address.
	locator := func(p netip.Prefix) string {
		var groups []string
		bytes := p.Addr().As16()
		for i := 0; i < 8; i += 2 {
			groups = append(groups, fmt.Sprintf("%x", uint16(bytes[i])<<8|uint16(bytes[i+1])))
		}
		return strings.Join(groups, ":")
	}
	for _, c := range []string{
		"ip link set lo up",
		fmt.Sprintf("ip -6 addr add %v/128 dev lo", b.there),
		fmt.Sprintf("ip ila add loc_match %s loc %s csum-mode %s ident-type luid", locator(far), locator(use.SIR),
			mode),
		fmt.Sprintf("ip -6 route add %v/128 encap ila %s csum-mode %s ident-type luid via %v dev eth0 src %v", b.here,
			locator(own), mode, n.Underlay, b.there),
	} {
		must(t, host.NS.Do(func() error {
			words := strings.Fields(c)
			out, err := exec.CommandContext(t.Context(), words[0], words[1:]...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%s: %w: %s", c, err, out)
			}
			return nil
		}))
	}
	// Both ends fill in checksums before a packet leaves, and compare those of packets that arrive.
	for _, ns := range []*netns.Namespace{b.container, host.NS} {
		must(t, inside(ns, func(h *netlink.Handle) error {
			l, err := h.LinkByName("eth0")
			if err != nil {
				return err
			}
			_, err1 := netns.Ethtool(l.Attrs().Name, unix.ETHTOOL_STXCSUM, 0)
			_, err2 := netns.Ethtool(l.Attrs().Name, unix.ETHTOOL_SRXCSUM, 0)
			return errors.Join(err1, err2)
		}))
	}
	b.captured, err = packet.NewCapture(n.NS, "eth0")
	must(t, err)
	t.Cleanup(func() { b.captured.Close() })
	return b
}

// patience is enough for an emulated CPU.
const patience = 2 * time.Minute

func (b *kernelBed) pings(t *testing.T) {
	t.Helper()
	for _, from := range []struct {
		name string
		ns   *netns.Namespace
		to   netip.Addr
	}{{"the container", b.container, b.there}, {"the kernel's host", b.Nodes[1].NS, b.here}} {
		r, err := packet.Ping(t.Context(), from.ns, from.to, packet.PingOptions{Count: 5, Timeout: patience})
		if err != nil || r.Received != 5 {
			t.Fatalf("pings from %s: %+v, %v", from.name, r, err)
		}
	}
}

// transfers sends bytes by TCP, with connections of both ends.
func (b *kernelBed) transfers(t *testing.T) {
	t.Helper()
	content := bytes.Repeat([]byte("pilaster"), 1<<15)
	for _, way := range []struct {
		name           string
		client, server *netns.Namespace
		to             netip.Addr
	}{
		{"from the container", b.container, b.Nodes[1].NS, b.there},
		{"from the kernel's host", b.Nodes[1].NS, b.container, b.here},
	} {
		at := netip.AddrPortFrom(way.to, 7).String()
		var l net.Listener
		must(t, way.server.Do(func() (err error) { l, err = net.Listen("tcp", at); return err }))
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { io.Copy(c, c); c.Close() }()
			}
		}()
		must(t, way.client.Do(func() error {
			c, err := net.DialTimeout("tcp", at, patience)
			if err != nil {
				return err
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(patience))
			go func() { c.Write(content); c.(*net.TCPConn).CloseWrite() }()
			got, err := io.ReadAll(c)
			if err == nil && !bytes.Equal(got, content) {
				t.Errorf("%s: %d of %d bytes came back, or others", way.name, len(got), len(content))
			}
			return err
		}))
		l.Close()
	}
}

// checksums reads the packets on the fabric: sources are as containers see them, and every checksum is right.
func (b *kernelBed) checksums(t *testing.T) {
	t.Helper()
	sentinel := packet.NewSentinel()
	must(t, b.container.Do(func() error {
		c, err := net.Dial("udp", netip.AddrPortFrom(b.there, 9).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(sentinel[:])
		return err
	}))
	all, err := b.captured.Until(t.Context(), sentinel.In)
	must(t, err)
	to, back := 0, 0
	for _, f := range all {
		p, err := f.Packet()
		if err != nil {
			continue // of another protocol
		}
		switch {
		case p.Source == b.here && (p.Destination == b.wireB || p.Destination == b.there):
			to++ // the kernel's ILA changes the destination in the capture's copy too, which shares the packet's memory
		case p.Source == b.there && p.Destination == b.wireA:
			back++
		default:
			continue
		}
		if f.ChecksumPartial || !packet.ChecksumOK(f.Frame[14:]) {
			t.Errorf("a packet from %v to %v has a wrong checksum, or none: %+v", p.Source, p.Destination, p)
		}
	}
	if to < 50 || back < 50 {
		t.Errorf("%d packets to the kernel's host and %d from it, want at least 50 of each", to, back)
	}
	t.Logf("%d packets to the kernel's host, %d from it", to, back)
}
