package ovs

import (
	"testing"

	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// TestForwarded: each entry to another node counts the packets that it has sent, cached or not.
func TestForwarded(t *testing.T) {
	b := newBed(t)
	b.plug(t)
	must(t, b.s.Apply(limit(t), nil, packettest.Entries()))
	sent := map[pipeline.Forward]uint64{}
	out := b.end(t, pipeline.VXLAN)
	for _, c := range packettest.Cases() {
		if c.From == pipeline.VXLAN || c.From == pipeline.Gateway || c.Frame != nil || c.Want().To != pipeline.VXLAN ||
			c.Want().Drop != 0 ||
			len(sent) == 2 {
			continue
		}
		_, trace := c.Table.Run(pipeline.Packet{From: c.From, Src: c.Packet.Source, Dst: c.Packet.Destination})
		by := trace[len(trace)-1].(pipeline.Forward)
		if sent[by] > 0 {
			continue
		}
		in := b.end(t, c.From)
		for range 3 + 4*len(sent) {
			must(t, in.Send(c.In()))
			if _, err := out.next(limit(t)); err != nil {
				t.Fatal(err)
			}
			sent[by]++
		}
	}
	got, err := Forwarded(limit(t), b.config.RunDir)
	must(t, err)
	others := 0
	for e, n := range got {
		if n != sent[e] {
			t.Errorf("%v has sent %d packets, but counts %d", e, sent[e], n)
		}
		if sent[e] == 0 {
			others++
		}
	}
	if len(sent) != 2 || len(got) != len(sent)+others || others == 0 {
		t.Errorf("sent %v, counted %v", sent, got)
	}
	if _, err := Forwarded(limit(t), folder(t)); err == nil {
		t.Error("counted in a folder without a daemon")
	}
}
