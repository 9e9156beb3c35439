package tables

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/packet"
)

// attached returns the programs at the first container's device and on the uplink, which packets meet, and their ids.
func (b *bed) attached(t testing.TB) (programs [2]*ebpf.Program, ids [2]ebpf.ProgramID) {
	t.Helper()
	l, err := b.path.Netlink.LinkByName("c1")
	must(t, err)
	ids[0], err = b.path.ProgramOn(l, netlink.HANDLE_MIN_INGRESS)
	must(t, err)
	pinned, err := link.LoadPinnedLink(filepath.Join(b.path.LinksDir(), "uplink_in"), nil)
	must(t, err)
	defer pinned.Close()
	info, err := pinned.Info()
	must(t, err)
	ids[1] = info.Program
	for i, id := range ids {
		p, err := ebpf.NewProgramFromID(id)
		must(t, err)
		t.Cleanup(func() { p.Close() })
		programs[i] = p
	}
	return programs, ids
}

// TestFollow: during a trace packets get the same verdicts, and cache misses are reported to the agent, as without. The
// trace reports each packet of its ends.
func TestFollow(t *testing.T) {
	for _, pull := range []bool{false, true} {
		t.Run(fmt.Sprint("pull ", pull), func(t *testing.T) {
			c := pullConfig()
			c.Pull = pull
			newBedWith(t, nil, c).checkFollow(t)
		})
	}
}

func (b *bed) checkFollow(t *testing.T) {
	sender := endpoint.Record{
		ID:          1,
		Device:      endpoint.Device{Kind: endpoint.Veth, HostName: "c1", HostIfindex: int(b.device[own])},
		Attachments: []endpoint.Attachment{{Network: ila.Name, Address: own}},
	}
	must(t, b.path.Driver(sender).AttachProgram(sender))
	must(t, b.path.AttachUplink())
	out := func(to netip.Addr) []byte { return sent(packet.Packet{Source: own, Destination: to, Body: gram}) }
	in := func(from netip.Addr) []byte {
		return b.coming(packet.Packet{Source: wire(from, 2), Destination: wire(own, 1), Body: gram})
	}
	type step struct {
		name   string
		at     int // in what attached returns
		frame  []byte
		in     skbHead
		want   string // events
		misses []ila.Miss
	}
	container, uplink := contextOf(b.device[own]), contextOf(b.uplink)
	steps := []step{
		{"to a known container", 0, out(far), container, "enter container, leave container", nil},
		{"to an unknown container", 0, out(absent), container,
			"enter container, drop container no-mapping, leave container", []ila.Miss{{Address: absent}}},
		{"from a known container", 1, in(far), uplink, "enter uplink-in, leave uplink-in", nil},
		{"from an unknown container", 1, in(absent), uplink,
			"enter uplink-in, drop uplink-in no-mapping, leave uplink-in", []ila.Miss{{Address: absent, Sender: true}}},
	}
	// results returns what the programs that are attached now do, and whose ids they are.
	results := func() (all []string, ids [2]ebpf.ProgramID) {
		programs, ids := b.attached(t)
		for _, s := range steps {
			verdict, _, reasons := b.run(t, programs[s.at], s.frame, s.in)
			var misses []ila.Miss
			if b.config.Pull {
				misses = b.reported(t)
				if !slices.Equal(misses, s.misses) {
					t.Errorf("%s: the agent gets the misses %v, want %v", s.name, misses, s.misses)
				}
			}
			all = append(all, fmt.Sprint(s.name, ": verdict ", verdict, ", drops ", reasons, ", misses ", misses))
		}
		return all, ids
	}

	before, normal := results()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	// Addresses on the fabric belong to these: a node need not know the locator of an unknown sender.
	events, err := b.path.Follow(ctx, dpapi.PacketFilter{
		Sources:      []netip.Addr{own, far, absent},
		Destinations: []netip.Addr{far, absent, own},
		Protocol:     packet.ProtocolUDP, Port: 53, Senders: []endpoint.Record{sender},
	})
	must(t, err)
	var seen []string
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for e := range events {
			seen = append(seen, strings.TrimSpace(fmt.Sprint(e.Point, " ", e.Hook, " ", e.Reason)))
			if len(seen) == 10 { // of all steps
				cancel()
			}
		}
	}()
	during, tracing := results()
	<-ended
	after, again := results()
	if tracing[0] == normal[0] || tracing[1] == normal[1] || again != normal {
		t.Errorf("programs %v, then %v during the trace, then %v", normal, tracing, again)
	}
	if !slices.Equal(during, before) || !slices.Equal(after, before) {
		t.Errorf("before the trace %q, during it %q, after it %q", before, during, after)
	}
	var want []string
	for _, s := range steps {
		want = append(want, s.want)
	}
	if got := strings.Join(seen, ", "); got != strings.Join(want, ", ") {
		t.Errorf("events %q, want %q", got, want)
	}
}
