package tables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/cilium/ebpf/ringbuf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/network/ila"
)

// usedUnits converts a time of CLOCK_MONOTONIC, in ns, to the units of the field used (mark_used in
// bpf/net/ila/miss.h).
func usedUnits(now uint64) uint32 { return uint32(now >> 30) }

// hookContainer is HOOK_CONTAINER of bpf/common/event.h.
const hookContainer = 1

// Misses calls deliver with the address of each packet's end of which the tables have no mapping, until ctx ends. A
// ring buffer has one reader, so only one call may be active at a time.
func (t *Tables) Misses(ctx context.Context, deliver func(ila.Miss)) error {
	reader, err := ringbuf.NewReader(t.objects.Maps[missesMap])
	if err != nil {
		return fmt.Errorf("read cache misses of network %s: %w", ila.Name, err)
	}
	defer reader.Close()
	defer context.AfterFunc(ctx, func() { reader.Close() })()
	for {
		record, err := reader.Read()
		if errors.Is(err, os.ErrClosed) || ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read cache misses of network %s: %w", ila.Name, err)
		}
		var m objectIlaMiss
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &m); err != nil {
			return fmt.Errorf("decode a cache miss of network %s: %w", ila.Name, err)
		}
		deliver(ila.Miss{Address: t.address(m.Identifier), Sender: m.Hook != hookContainer})
	}
}

// Idle returns how long ago a packet last used each mapping. That is exact to 1.1 s for packets that begin a flow; a
// packet of a known flow does not count, but Idle ends all flows, so that it counts at the next call.
func (t *Tables) Idle() (map[netip.Addr]time.Duration, error) {
	entries, all := map[uint64]objectIlaPeer{}, map[netip.Addr]time.Duration{}
	if err := bpfobj.ReadEntries(t.peers(), entries); err != nil {
		return nil, err
	}
	now, err := monotonic()
	if err != nil {
		return nil, err
	}
	for id, v := range entries {
		// The difference of the 32-bit numbers is right also after an overflow.
		all[t.address(id)] = time.Duration(max(0, int32(usedUnits(now)-v.Used))) << 30
	}
	return all, t.changed()
}
