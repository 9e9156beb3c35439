package tables

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/packet"
)

func pullConfig() Config {
	return Config{ILA: use, Locator: locator(1), Endpoints: 100, Mappings: 1000, Pull: true}
}

// reported returns the cache misses until the one of a sentinel, which it causes in the table itself.
func (b *bed) reported(t testing.TB) (all []ila.Miss) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	const sentinelVNID = 9
	sentinel := sir(sentinelVNID, 1)
	must(t, b.SetLocal(sir(sentinelVNID, 2), &ila.Local{Device: b.device[other], Endpoint: 99}))
	b.fromContainer(t, other, sent(packet.Packet{Source: sir(sentinelVNID, 2), Destination: sentinel, Body: gram}))
	must(t, b.Misses(ctx, func(m ila.Miss) {
		if m.Address == sentinel {
			cancel()
		} else {
			all = append(all, m)
		}
	}))
	if context.Cause(ctx) != context.Canceled {
		t.Log("the sentinel was not reported")
	}
	return all
}

// wrongPull is wrong for a node that subscribes to mappings.
func (b *bed) wrongPull(t testing.TB) (names []string) {
	t.Helper()
	note := func(name string, ok bool, got any) {
		if !ok {
			t.Logf("pull, %s: %v", name, got)
			names = append(names, "pull, "+name)
		}
	}
	out := func(from, to netip.Addr) {
		b.fromContainer(t, from, sent(packet.Packet{Source: from, Destination: to, Body: gram}))
	}
	in := func(from, to netip.Addr) {
		b.fromFabric(t, b.coming(packet.Packet{Source: from, Destination: to, Body: gram}))
	}
	sender := []ila.Miss{{Address: absent, Sender: true}}
	for _, step := range []struct {
		name string
		send func()
		want []ila.Miss
	}{
		{"known ones", func() { out(own, far); out(own, beside); in(wire(far, 2), wire(own, 1)) }, nil},
		{"of another tenant", func() { out(own, sir(gold, 99)) }, nil},
		{"from a container", func() { out(own, absent) }, []ila.Miss{{Address: absent}}},
		{"from the fabric", func() { in(wire(absent, 2), wire(own, 1)) }, sender},
		{"to a container that has moved", func() { in(wire(absent, 2), wire(gone, 1)) }, sender},
		{"to an absent container", func() { in(wire(absent, 2), wire(absent, 1)) }, nil},
	} {
		step.send()
		got := b.reported(t)
		note(step.name, slices.Equal(got, step.want), got)
	}

	const hookUplink, interval = 2, 5 * time.Millisecond
	pace := func(hook uint32, at uint64) {
		must(t, b.objects.Maps["ila_pace_v1"].Put(objectIlaMissSource{Vnid: green, Hook: hook}, at))
	}
	now, err := monotonic()
	must(t, err)
	never := now + uint64(time.Hour)
	pace(hookContainer, never)
	out(own, absent)
	got := b.reported(t)
	note("many identifiers", got == nil, got)
	out(other, sir(gold, 98))
	got = b.reported(t)
	note("of another tenant meanwhile", slices.Equal(got, []ila.Miss{{Address: sir(gold, 98)}}), got)
	pace(hookContainer, 1)
	pace(hookUplink, never)
	in(wire(absent, 2), wire(own, 1))
	got = b.reported(t)
	note("many forged senders", got == nil, got)
	out(own, absent)
	got = b.reported(t)
	note("while senders are forged", slices.Equal(got, []ila.Miss{{Address: absent}}), got)
	now, err = monotonic()
	must(t, err)
	begun, at := now+250*uint64(time.Millisecond), uint64(0) // within the burst
	pace(hookContainer, begun)
	for range 9 {
		out(own, absent)
	}
	must(t, b.objects.Maps["ila_pace_v1"].Lookup(objectIlaMissSource{Vnid: green, Hook: hookContainer}, &at))
	note("pace", at >= begun+9*uint64(interval), at-begun)

	for name, send := range map[string]func(){
		"use to the fabric":                             func() { out(own, far) },
		"use from the fabric":                           func() { in(wire(far, 2), wire(own, 1)) },
		"use by a packet to a container that has moved": func() { in(wire(far, 2), wire(gone, 1)) },
	} {
		b.lastUse(t, far, usedUnits(now)-1000)
		_, err := b.Idle() // ends the flow
		must(t, err)
		send()
		idle, err := b.Idle()
		must(t, err)
		note(name, idle[far] < time.Minute, idle[far])
	}
	b.lastUse(t, far, usedUnits(now)-100)
	idle, err := b.Idle()
	must(t, err)
	note("no use", idle[far] > 100*time.Second && idle[far] < time.Hour, idle[far])
	return names
}

// lastUse sets when a packet last used a mapping.
func (b *bed) lastUse(t testing.TB, a netip.Addr, used uint32) {
	t.Helper()
	b.changePeer(t, a, func(p *objectIlaPeer) { p.Used = used })
}

// TestPull: what a node reports that subscribes to mappings, and that it knows which ones packets use.
func TestPull(t *testing.T) {
	for _, name := range newBedWith(t, nil, pullConfig()).wrongPull(t) {
		t.Errorf("%s: see above", name)
	}
}

// TestPush: a node that receives all mappings reports nothing.
func TestPush(t *testing.T) {
	b := newBed(t, nil)
	b.fromContainer(t, own, sent(packet.Packet{Source: own, Destination: absent, Body: gram}))
	var source objectIlaMissSource
	if all := b.objects.Maps["ila_pace_v1"].Iterate(); all.Next(&source, new(uint64)) {
		t.Errorf("a miss was reported: %+v", source)
	}
}
