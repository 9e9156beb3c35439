package tables

import (
	"maps"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/packet"
)

// sirSteps are packets from the fabric with the source that containers see, as the kernel's ILA sends them.
func (b *bed) sirSteps() []step {
	p := func(from, to netip.Addr, body packet.Body) []byte {
		return b.coming(packet.Packet{Source: from, Destination: to, Body: body})
	}
	here := wire(own, 1)
	return []step{
		{name: "sir, UDP", frame: p(far, here, gram), out: packet.Packet{Source: far, Destination: own, Body: gram}},
		{name: "sir, UDP again, by a known flow", frame: p(far, here, gram),
			out: packet.Packet{Source: far, Destination: own, Body: gram}},
		{name: "sir, error of a container", frame: p(far, here, quoting(packet.DestinationUnreachable, own, far)),
			out: packet.Packet{Source: far, Destination: own, Body: quoting(packet.DestinationUnreachable, own, far)}},
		{name: "sir, from a locator", frame: p(wire(far, 2), here, gram), reason: "tenant-mismatch"},
		{name: "sir, from a container here", frame: p(beside, here, gram), reason: "no-mapping"},
		{name: "sir, from an unknown container", frame: p(absent, here, gram), reason: "no-mapping"},
		{name: "sir, from another tenant", frame: p(alien, here, gram), reason: "tenant-mismatch"},
		{name: "sir, from an identifier of another prefix",
			frame: p(withPrefix(far, netip.MustParseAddr("2001:db8::")), here, gram), reason: "tenant-mismatch"},
	}
}

// wrongSIR is wrong for a node whose peers are like the kernel's ILA.
func (b *bed) wrongSIR(t testing.TB) (names []string) {
	t.Helper()
	check := func(s step, run func([]byte) (uint32, []byte, map[string]uint64)) {
		verdict, out, why := run(s.frame)
		ok := maps.Equal(why, counts(s.reason)) && (verdict == verdictRedirect) == (s.reason == "")
		if s.reason == "" {
			ok = ok && string(out[14:]) == string(s.out.Marshal())
		}
		if !ok {
			got, err := packet.DecodeFrame(out)
			t.Logf("%s: verdict %d, drops %v, want %q; got %+v, %v", s.name, verdict, why, s.reason, got, err)
			names = append(names, s.name)
		}
	}
	for _, s := range b.sirSteps() {
		check(s, func(f []byte) (uint32, []byte, map[string]uint64) { return b.fromFabric(t, f) })
	}
	leaves := step{
		name: "sir, to the fabric", frame: sent(packet.Packet{Source: own, Destination: far, Body: segment}),
		out: packet.Packet{Source: own, Destination: wire(far, 2), HopLimit: 63, Body: segment},
	}
	check(leaves, func(f []byte) (uint32, []byte, map[string]uint64) { return b.fromContainer(t, own, f) })
	return names
}

func sirConfig() Config {
	return Config{ILA: use, Locator: locator(1), Endpoints: 100, Mappings: 1000, SourceStays: true}
}

// TestSourceStays: with --ila-source sir only destinations have locators, and a sender must only exist.
func TestSourceStays(t *testing.T) {
	for _, name := range newBedWith(t, nil, sirConfig()).wrongSIR(t) {
		t.Errorf("%s: see above", name)
	}
}

// TestNoCBit: with --ila-cbit off, identifiers on the fabric have no C bit, and those that have it are refused.
func TestNoCBit(t *testing.T) {
	auto := use
	auto.NoCBit = true
	b := newBedWith(t, nil, Config{ILA: auto, Locator: locator(1), Endpoints: 100, Mappings: 1000})
	here, there := auto.ToWire(own, locator(1)), auto.ToWire(far, locator(2))
	_, out, why := b.fromContainer(t, own, sent(packet.Packet{Source: own, Destination: far, Body: segment}))
	want := packet.Packet{Source: here, Destination: there, HopLimit: 63, Body: segment}
	if len(why) > 0 || string(out[14:]) != string(want.Marshal()) {
		got, err := packet.DecodeFrame(out)
		t.Errorf("to the fabric: drops %v, got %+v, %v, want %+v", why, got, err, want)
	}
	_, out, why = b.fromFabric(t, b.coming(packet.Packet{Source: there, Destination: here, Body: segment}))
	want = packet.Packet{Source: far, Destination: own, Body: segment}
	if len(why) > 0 || string(out[14:]) != string(want.Marshal()) {
		got, err := packet.DecodeFrame(out)
		t.Errorf("from the fabric: drops %v, got %+v, %v, want %+v", why, got, err, want)
	}
	_, _, why = b.fromFabric(t, b.coming(packet.Packet{Source: there, Destination: wire(own, 1), Body: segment}))
	if !maps.Equal(why, counts("no-endpoint")) {
		t.Errorf("with the C bit: drops %v, want no-endpoint", why)
	}
}

// TestAnotherSize: a table of another size takes over the entries, or refuses to if they do not fit.
func TestAnotherSize(t *testing.T) {
	b := newBed(t, nil)
	want, err := b.Peers()
	must(t, err)
	for _, size := range []int{5000, 2000} {
		larger, err := Open(b.path, Config{ILA: use, Locator: locator(1), Endpoints: 100, Mappings: size})
		must(t, err)
		got, err := larger.Peers()
		must(t, err)
		if !maps.Equal(got, want) {
			t.Errorf("%d mappings: %+v, before %+v", size, got, want)
		}
		must(t, larger.Close())
	}
	must(t, b.SetPeers(map[netip.Addr]ila.Peer{}, nil))
	if small, err := Open(b.path, Config{ILA: use, Locator: locator(1), Endpoints: 100, Mappings: 2}); err == nil {
		small.Close()
		t.Errorf("%d mappings fit into a table of 2", len(want))
	}
}
