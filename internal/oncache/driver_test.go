package oncache

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// driver runs a program on packets as devices make them, which a test run alone cannot. The one of the sender puts
// headers before a frame as the kernel's device does, and calls the program; the one of the receiver says that a device
// has verified the outermost checksum.
type driver struct {
	headers *ebpf.Map // the outer headers and the inner Ethernet header
	program *ebpf.Program
}

// Of enum bpf_adj_room_mode, and flags of bpf_skb_adjust_room.
const (
	roomMAC  = 1
	fixedGSO = 1 << 0
	encap4   = 1 << 1
	encap6   = 1 << 2
	encapUDP = 1 << 4
	encapL2  = 1<<6 | 14<<56
)

// outerSize is the length of the outer headers, without the inner Ethernet header.
func (w world) outerSize() int { return w.at("inner to") }

func newSender(t testing.TB, w world, target *ebpf.Program) *driver {
	t.Helper()
	size, flags := int32(w.outerSize()), int64(fixedGSO|encapUDP|encap6)
	if w.outer4 {
		flags = fixedGSO | encapUDP | encap4
	}
	flags |= encapL2
	d := &driver{}
	var err error
	d.headers, err = ebpf.NewMap(
		&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: uint32(size) + 14, MaxEntries: 1})
	must(t, err)
	t.Cleanup(func() { d.headers.Close() })
	d.program = calling(t, target, asm.Instructions{
		asm.Mov.Imm(asm.R2, size),
		asm.Mov.Imm(asm.R3, roomMAC),
		asm.LoadImm(asm.R4, flags, asm.DWord),
		asm.FnSkbAdjustRoom.Call(),
		asm.JNE.Imm(asm.R0, 0, "failed"),
		asm.StoreImm(asm.R10, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, d.headers.FD()),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "failed"),
		asm.Mov.Reg(asm.R3, asm.R0),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Imm(asm.R4, size+14),
		asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.JNE.Imm(asm.R0, 0, "failed"),
	})
	return d
}

const oneLevel = 1 // BPF_CSUM_LEVEL_INC

func newReceiver(t testing.TB, target *ebpf.Program) *driver {
	t.Helper()
	return &driver{program: calling(t, target, asm.Instructions{
		asm.Mov.Imm(asm.R2, oneLevel),
		asm.FnCsumLevel.Call(),
		asm.JSLT.Imm(asm.R0, 0, "failed"),
	})}
}

// calling returns a program that changes the packet and calls another one.
func calling(t testing.TB, target *ebpf.Program, change asm.Instructions) *ebpf.Program {
	t.Helper()
	targets, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	must(t, err)
	t.Cleanup(func() { targets.Close() })
	must(t, targets.Put(uint32(0), target))
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: slices.Concat(asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}, change, asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.LoadMapPtr(asm.R2, targets.FD()),
			asm.Mov.Imm(asm.R3, 0),
			asm.FnTailCall.Call(),
			asm.Mov.Imm(asm.R0, -2).WithSymbol("failed"), // no verdict of a program
			asm.Return(),
		}),
	})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

// of returns program and data of a test run that ends as one of the target on the frame.
func (d *driver) of(t testing.TB, w world, frame []byte) (*ebpf.Program, []byte) {
	t.Helper()
	size := w.outerSize()
	must(t, d.headers.Put(uint32(0), frame[:size+14]))
	return d.program, frame[size:]
}

// isTunnelled reports whether a frame has headers of the tunnel before an IP packet.
func (w world) isTunnelled(frame []byte) bool {
	at := w.at("target")
	return len(frame) >= w.at("inner")+20 && binary.BigEndian.Uint16(frame[at:]) == tunnels
}
