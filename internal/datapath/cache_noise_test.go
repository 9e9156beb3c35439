package datapath

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
)

// TestNoiseTakesNoSlot: a container that invents addresses evicts no flow from the cache, because a slot is
// written only once the address has proven to be one of its tenant.
func TestNoiseTakesNoSlot(t *testing.T) {
	b := newProgBench(t)
	established := b.cached(t, b.b3.Addr(), 1500)
	b.fillCache(t, established)
	random := rand.New(rand.NewPCG(1, 2))
	before := b.drops(t)["dst-undecryptable"]
	const packets = 20_000 // so that 99 % of the slots are looked up
	must(t, b.ns.Do(func() error {
		for range packets {
			to := [16]byte{0: 0xfc}
			binary.BigEndian.PutUint32(to[1:], random.Uint32())
			binary.BigEndian.PutUint64(to[8:], random.Uint64())
			frame := b.frame(b.sent(netip.AddrFrom16(to), gram))
			verdict, err := b.datapath.Objects.PilContainer.Run(
				&ebpf.RunOptions{Data: frame, Context: skb{Ifindex: b.b1.ifindex()}},
			)
			if err != nil {
				return err
			}
			if verdict != verdictDrop {
				return fmt.Errorf("%v: verdict %d", netip.AddrFrom16(to), verdict)
			}
		}
		return nil
	}))
	if dropped := b.drops(t)["dst-undecryptable"] - before; dropped != packets {
		t.Errorf("%d of %d were dropped for it", dropped, packets)
	}
	taken := 0
	for slot := range b.datapath.Objects.PilFlows.MaxEntries() {
		var now bpfobj.PilasterFlow
		must(t, b.datapath.Objects.PilFlows.Lookup(slot, &now))
		if now != established {
			taken++
		}
	}
	if taken > 0 {
		t.Errorf("noise has taken %d slots", taken)
	}
}
