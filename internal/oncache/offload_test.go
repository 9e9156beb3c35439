package oncache

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// offload switches segmentation by the kernel's stack, and merging of received packets.
func (l *lab) offload(t *testing.T, segmentation, merging bool) {
	t.Helper()
	values := map[bool]uint32{true: 1}
	for _, n := range []*node{l.a, l.b} {
		for _, d := range []struct {
			ns     *netns.Namespace
			device string
		}{{n.container, "eth0"}, {n.ns, "container"}, {n.ns, "overlay"}, {n.ns, "eth0"}} {
			must(t, d.ns.Do(func() error {
				var errs []error
				for command, on := range map[uint32]bool{
					unix.ETHTOOL_STSO: segmentation, unix.ETHTOOL_SGSO: segmentation, unix.ETHTOOL_SGRO: merging,
				} {
					if _, err := netns.Ethtool(d.device, command, values[on]); err != nil {
						errs = append(errs, fmt.Errorf("%s: setting %#x: %w", d.device, command, err))
					}
				}
				return errors.Join(errs...)
			}))
		}
	}
}

// segments sends a datagram of many with UDP_SEGMENT, and expects all of them.
func segments(t *testing.T, from, to *net.UDPConn, all []byte, size int) {
	t.Helper()
	raw, err := from.SyscallConn()
	must(t, err)
	set := func(size int) {
		var failed error
		must(t, errors.Join(raw.Control(func(fd uintptr) {
			failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
		}), failed))
	}
	set(size)
	_, err = from.WriteTo(all, to.LocalAddr())
	must(t, err)
	set(0)
	must(t, to.SetReadDeadline(time.Now().Add(long)))
	b := make([]byte, 2000)
	for at := 0; at < len(all); at += size {
		n, err := to.Read(b)
		if err != nil || !bytes.Equal(b[:n], all[at:at+size]) {
			t.Fatalf("datagram %d of %d: %d bytes, not those of the sender, %v", at/size, len(all)/size, n, err)
		}
	}
}

// Streams and UDP_SEGMENT data of cached flows arrive whole with any combination of offloads.
func TestOffloads(t *testing.T) {
	for _, outer4 := range []bool{false, true} {
		l := newLab(t, outer4)
		l.renewed(t)
		l.b.serve(t)
		c := l.a.dial(t, 4000, "10.1.2.1:7000")
		a, b := l.a.listen(t, true, 4000), l.b.listen(t, true, 5000)
		talk(t, a, b, 5)
		data := make([]byte, 1_000_000)
		_, err := rand.Read(data)
		must(t, err)
		for _, segmentation := range []bool{false, true} {
			for _, merging := range []bool{false, true} {
				t.Run(fmt.Sprintf("outer IPv4 %v, GSO %v, GRO %v", outer4, segmentation, merging), func(t *testing.T) {
					l.offload(t, segmentation, merging)
					before, _ := l.a.hits(t)
					echo(t, c, data)
					if after, _ := l.a.hits(t); after-before < 10 {
						t.Errorf("%d hits", after-before)
					}
					segments(t, a, b, data[:10_000], 1000)
					talk(t, b, a, 1)
				})
			}
		}
	}
}
