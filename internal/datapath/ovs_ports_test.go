package datapath

import (
	"bytes"
	"context"
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// TestTapped: the program on the way out drops and counts packets of Open vSwitch to a container or the gateway that
// the switch cannot check. Open vSwitch sees no error. Packets of netpila and all others pass unchanged.
func TestTapped(t *testing.T) {
	b := newNimitzBench(t)
	taps := hook.NewOVSPorts(b.datapath.Hooks)
	b.datapath.ActiveOVSPorts = taps
	device := b.records[0].Device.HostName
	must(t, b.nimitz.Unplug(t.Context(), 2))
	must(t, b.nimitz.Unplug(t.Context(), pipeline.Gateway))
	plug := func() {
		must(t, taps.Plug(t.Context(), 2, pipeline.Device{Name: device}))
		must(t, taps.Plug(t.Context(), pipeline.Gateway, pipeline.Device{Name: "gateway"}))
	}
	plug()
	plug() // again
	inject := func(device string) *packet.Injector {
		i, err := packet.NewInjector(b.ns, device)
		must(t, err)
		t.Cleanup(func() { i.Close() })
		return i
	}
	container, gateway := inject(device), inject("gateway")
	comes := func(name string, at pipeline.Port, frame []byte) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		for {
			got, err := b.captures[at].Next(ctx)
			if err != nil {
				t.Errorf("%s: it does not come: %v", name, err)
				return
			}
			if bytes.Equal(got.Frame, frame) {
				return
			}
		}
	}

	gram4 := packet.Packet{Source: far4, Destination: own4, Body: gram}
	gram6 := packet.Packet{Source: far6, Destination: own6, Body: gram}
	with := func(p packet.Packet, body packet.Body) packet.Packet { p.Body = body; return p }
	given := func(p packet.Packet) []byte { return p.Frame(pipeline.InsideMAC, pipeline.OutsideMAC) }
	changed := func(p packet.Packet, change func(header []byte)) []byte {
		frame := given(p)
		change(frame[14:])
		return frame
	}
	quoting := func(kind uint8, source, destination netip.Addr) packet.ICMP {
		return packet.ICMP{
			Type:    kind,
			Payload: packet.Packet{Source: source, Destination: destination, Body: gram}.Marshal(),
		}
	}
	routing := gram6
	routing.Extensions = []packet.Extension{{Type: packet.Routing, Data: make([]byte, 6)}}
	plan := address.DefaultPlan()
	base, private := plan.Base.Addr().Next(), plan.Private.Addr().Next()
	router := netip.MustParseAddr("fd10::1")
	strange := quoting(packet.TimeExceeded, far6, router)
	cases := []struct {
		name  string
		frame []byte
		why   dropreason.Reason // 0: it comes
	}{
		{"a packet, IPv4", given(gram4), 0},
		{"a packet, IPv6", given(gram6), 0},
		{"a routing header", given(routing), dropreason.RoutingHeader},
		{"options", changed(gram4, func(h []byte) { h[0] = 0x46 }), dropreason.RoutingHeader},
		{
			"half a TCP header, IPv4",
			given(with(gram4, packet.Raw{Proto: 6, Data: make([]byte, 12)})),
			dropreason.Malformed,
		},
		{
			"half a UDP header, IPv6",
			given(with(gram6, packet.Raw{Proto: 17, Data: make([]byte, 4)})),
			dropreason.Malformed,
		},
		{
			"half an ICMP header, IPv6",
			given(with(gram6, packet.Raw{Proto: 58, Data: []byte{128, 0, 0, 0}})),
			dropreason.Malformed,
		},
		{"longer than it is", changed(gram6, func(h []byte) { h[5]++ }), dropreason.Malformed},
		{"an error, IPv4", given(with(gram4, quoting(packet.Unreachable4, own4, far4))), 0},
		{"an error, IPv6", given(with(gram6, quoting(packet.DestinationUnreachable, own6, far6))), 0},
		{
			"an error about another sender's packet, IPv4",
			given(with(gram4, quoting(packet.Unreachable4, beside4, far4))),
			dropreason.IcmpQuote,
		},
		{
			"an error about a packet for another receiver, IPv6",
			given(with(gram6, quoting(packet.TimeExceeded, own6, router))),
			dropreason.IcmpQuote,
		},
		{
			"an error that quotes nothing, IPv6",
			given(with(gram6, packet.ICMP{Type: packet.PacketTooBig})),
			dropreason.IcmpQuote,
		},
		{"netpila's", given(packet.Packet{Source: private, Destination: base, Body: strange}), 0},
		{"netpila's the other way", given(packet.Packet{Source: base, Destination: private, Body: strange}), 0},
		{"to netpila", given(packet.Packet{Source: far6, Destination: private, Body: strange}), dropreason.IcmpQuote},
		{"from netpila", given(packet.Packet{Source: private, Destination: own6, Body: strange}), dropreason.IcmpQuote},
	}
	for _, to := range []struct {
		name string
		port pipeline.Port
		by   *packet.Injector
	}{{"", 2, container}, {" to the gateway", pipeline.Gateway, gateway}} {
		for _, c := range cases {
			name, before := c.name+to.name, b.drops(t)
			if err := to.by.Send(c.frame); err != nil {
				t.Errorf("%s: the sender got %v", name, err)
			}
			if c.why != 0 {
				b.dropped(t, name, before, c.why)
				continue
			}
			comes(name, to.port, c.frame)
			if got := b.counted(t, before); len(got) != 0 {
				t.Errorf("%s: counted %v", name, got)
			}
		}
	}

	// The program stays as long as the device is plugged, and CHECK detects if it is missing.
	is := pipeline.Device{Name: device}
	if err := taps.Check(t.Context(), is); err != nil {
		t.Errorf("plugged: %v", err)
	}
	says := func(device string) (said int) {
		status, err := b.datapath.Status()
		must(t, err)
		for _, p := range status.Problems {
			if strings.Contains(p, "pil_tapped") && strings.Contains(p, " "+device) {
				said++
			}
		}
		return said
	}
	index := taps.Devices[2]
	if says("") != 0 {
		t.Error("status misses a program that stands")
	}
	must(t, taps.Detach(int(index)))
	if err := taps.Check(t.Context(), is); err == nil || says(device) != 1 {
		t.Error("without its program a device is found in order")
	}
	must(t, taps.Detach(int(taps.Devices[pipeline.Gateway])))
	if says("(2 devices") != 1 {
		t.Error("status does not miss both programs")
	}
	must(t, taps.Detach(int(index)))
	plug()
	if says("") != 0 {
		t.Error("status misses a program that stands again")
	}
	must(t, taps.Unplug(t.Context(), 2))
	if err := taps.Check(t.Context(), is); err == nil {
		t.Error("unplugged: the program stands")
	}
	must(t, container.Send(given(routing)))
	comes("unplugged", 2, given(routing))
	must(t, taps.Detach(1<<20))
	if err := taps.Check(t.Context(), pipeline.Device{Name: "nothing"}); err == nil {
		t.Error("no device is found in order")
	}
}
