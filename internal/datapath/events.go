package datapath

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
)

// hookNames are the names of bpf/common/event.h's enum hook.
var hookNames = map[uint32]string{
	1: "container",
	2: "uplink-in",
	3: "uplink-out",
	4: "node",
	5: "edge-in",
	6: "edge-out",
	7: "tunnel",
	8: "gateway",
	9: "switch",
}

// Events delivers drops as the programs report them. A ring buffer has one reader, so only one call may be active at a
// time.
func (d *Datapath) Events(ctx context.Context) (<-chan dpapi.Event, error) {
	reader, err := ringbuf.NewReader(d.Objects.PilEventsV2)
	if err != nil {
		return nil, fmt.Errorf("read the events: %w", err)
	}
	events := make(chan dpapi.Event)
	stop := context.AfterFunc(ctx, func() { reader.Close() })
	go func() {
		defer close(events)
		defer stop()
		defer reader.Close()
		for {
			record, err := reader.Read()
			if errors.Is(err, os.ErrClosed) || ctx.Err() != nil {
				return
			}
			if err != nil {
				d.Log.Warn("cannot read an event", "error", err)
				continue
			}
			event, err := d.decodeEvent(record.RawSample)
			if err != nil {
				d.Log.Warn("cannot decode an event", "error", err)
				continue
			}
			select {
			case events <- event:
			case <-ctx.Done():
				return
			}
		}
	}()
	return events, nil
}

func (d *Datapath) decodeEvent(sample []byte) (dpapi.Event, error) {
	var e bpfobj.PilasterDropEvent
	if len(sample) < int(unsafe.Sizeof(e)) {
		return dpapi.Event{}, fmt.Errorf("an event of %d bytes, not %d", len(sample), unsafe.Sizeof(e))
	}
	if _, err := binary.Decode(sample, binary.NativeEndian, &e); err != nil {
		return dpapi.Event{}, err
	}
	event := dpapi.Event{
		Time: wallClock(
			e.Time,
		), Type: "drop", Reason: dropreason.Reason(e.Reason).String(), Hook: hookNames[e.Hook], Count: e.Count,
		Protocol: e.Proto, SourcePort: swapPort(e.Sport), DestinationPort: swapPort(e.Dport),
		Length: int(e.Length), Endpoint: d.EndpointOf(e.Ifindex), Ifindex: int(e.Ifindex), Lost: e.Lost, Rule: e.Rule,
	}
	switch e.Version {
	case 4:
		event.Source, event.Destination = e.Src.Addr().Unmap(), e.Dst.Addr().Unmap()
	case 6:
		event.Source, event.Destination = e.Src.Addr(), e.Dst.Addr()
	}
	return event, nil
}

func swapPort(port uint16) uint16 {
	return binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, port))
}

// wallClock turns the kernel's monotonic time into a date.
func wallClock(monotonic uint64) time.Time {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return time.Now()
	}
	return time.Now().Add(time.Duration(int64(monotonic) - now.Nano()))
}
