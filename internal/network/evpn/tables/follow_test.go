package tables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/evpn"
	"pilaster.io/pilaster/internal/packet"
)

// TestFollow: during a trace all packets get the verdicts that they get without one, and the trace reports each place
// of those packets of the tenant that it is about. Afterwards the programs of before are attached.
func TestFollow(t *testing.T) {
	b := newBed(t, nil)
	l, err := b.path.Netlink.LinkByName("c1")
	must(t, err)
	attached := func() (ids [2]ebpf.ProgramID) {
		t.Helper()
		var err error
		ids[0], err = b.path.ProgramOn(l, netlink.HANDLE_MIN_INGRESS)
		must(t, err)
		must(t, b.path.Objects.PilUplinksV1.Lookup(hook.UplinkTunnel4, &ids[1]))
		return ids
	}
	before := attached()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ends := []netip.Addr{own, far, switched, beyond}
	events, err := b.path.Follow(ctx, dpapi.PacketFilter{
		Sources: ends, Destinations: ends, Protocol: packet.ProtocolUDP, Port: gram.DestinationPort, VNI: uint32(vni),
		Senders: []endpoint.Record{{
			ID:          2,
			Device:      endpoint.Device{Kind: endpoint.Veth, HostName: "c1", HostIfindex: l.Attrs().Index},
			Attachments: []endpoint.Attachment{{Network: evpn.Name, Address: own}},
		}},
	})
	must(t, err)
	var want, got []string
	follows := func(p packet.Packet) bool {
		return slices.Contains(ends, p.Source) && slices.Contains(ends, p.Destination)
	}
	way := func(at, reason string) string {
		inside := "pipeline " + at
		if reason != "" {
			inside = fmt.Sprintf("drop %s %s", at, reason)
		}
		return fmt.Sprintf("enter %s, %s, leave %s", at, inside, at)
	}
	for _, c := range arrivals() {
		if follows(c.packet) && (c.outer.vni == vni || c.outer.vni == segment) && c.outer.from != ownVTEP {
			want = append(want, way("tunnel", c.reason))
		}
	}
	for _, c := range departures() {
		if follows(c.packet) {
			want = append(want, way("container", c.reason))
		}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for e := range events {
			got = append(got, strings.TrimSpace(fmt.Sprint(e.Point, " ", e.Hook, " ", e.Reason)))
			if e.Point == dpapi.PacketPipeline && e.VNI != uint32(vni) {
				t.Errorf("the pipeline of VNI %d", e.VNI)
			}
		}
	}()
	during := attached()
	if during[0] == before[0] || during[1] == before[1] {
		t.Errorf("programs %v, and %v during the trace", before, during)
	}
	if failed := b.wrong(t); len(failed) > 0 {
		t.Errorf("during the trace: %q", failed)
	}
	cancel()
	<-ended
	if after := attached(); after != before {
		t.Errorf("programs %v, and %v after the trace", before, after)
	}
	if strings.Join(got, ", ") != strings.Join(want, ", ") {
		t.Errorf("events\n%s\nwant\n%s", strings.Join(got, ", "), strings.Join(want, ", "))
	}
}
