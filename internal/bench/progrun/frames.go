package progrun

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// Frames holds packets in a map, and driver programs that pass them to a program one by one. Without a driver,
// BPF_PROG_TEST_RUN would repeat a single packet, which the datapath has already modified in the first run.
type Frames struct {
	hook          *Hook
	Size          int // of each, in bytes
	packets, next *ebpf.Map
	driver        *ebpf.Program
	idle          *ebpf.Program // the driver of the empty program
	Sent          uint64        // packets that the driver has passed on, including those of interrupted runs
}

// Verdicts of a packet.
const (
	Forwarded = 7 // TC_ACT_REDIRECT
	Dropped   = 2 // TC_ACT_SHOT
)

// NewFrames loads the first packets; their number is the largest power of two that is not greater than len(all). Before
// each packet, the driver increments the counters in voids, which are generations of the datapath, so that the packet
// misses the cache.
func NewFrames(h *Hook, all []Frame, voids ...*ebpf.Map) (*Frames, error) {
	heads := make([][]byte, len(all))
	for i := range all {
		heads[i] = all[i][:headBytes]
	}
	return NewHeads(h, heads, frameBytes+32, voids...)
}

// NewHeads is NewFrames for packets of size bytes that begin with heads, which all have the same length.
func NewHeads(h *Hook, heads [][]byte, size int, voids ...*ebpf.Map) (_ *Frames, err error) {
	f := &Frames{hook: h, Size: size}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	n := 1
	for n*2 <= len(heads) {
		n *= 2
	}
	length := len(heads[0])
	room := (length + 7) &^ 7 // as the kernel lays values out
	f.packets, err = ebpf.NewMap(&ebpf.MapSpec{
		Name: "bench_packets", Type: ebpf.Array, KeySize: 4, ValueSize: uint32(room), MaxEntries: uint32(n),
		Flags: unix.BPF_F_MMAPABLE,
	})
	if err != nil {
		return nil, fmt.Errorf("room for %d packets: %w", n, err)
	}
	memory, err := f.packets.Memory()
	if err != nil {
		return nil, err
	}
	for i := range n {
		if _, err := memory.WriteAt(heads[i][:length], int64(i*room)); err != nil {
			return nil, err
		}
	}
	f.next, err = ebpf.NewMap(
		&ebpf.MapSpec{Name: "bench_next", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1},
	)
	if err != nil {
		return nil, err
	}
	for target, driver := range map[*ebpf.Map]**ebpf.Program{h.target: &f.driver, h.idle: &f.idle} {
		*driver, err = ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "bench_driver", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
			Instructions: driverOf(f.packets, f.next, target, voids, int32(n-1), int32(length)),
		})
		if err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (f *Frames) Close() error {
	return errors.Join(f.packets.Close(), f.next.Close(), f.driver.Close(), f.idle.Close())
}

// headBytes is the part of a Frame that is copied: the headers.
const headBytes = 14 + 40 + 8

// driverOf returns a program that copies the head of the next packet into the skb and calls the target.
func driverOf(packets, next, target *ebpf.Map, voids []*ebpf.Map, mask, head int32) asm.Instructions {
	lookup := func(m *ebpf.Map) asm.Instructions {
		return asm.Instructions{
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.R10),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
		}
	}
	zeroKey := asm.StoreImm(asm.R10, -4, 0, asm.Word)
	count := func(size asm.Size) asm.Instructions { // leaves the old count in R7
		return asm.Instructions{
			asm.LoadMem(asm.R7, asm.R0, 0, size),
			asm.Mov.Reg(asm.R1, asm.R7),
			asm.Add.Imm(asm.R1, 1),
			asm.StoreMem(asm.R0, 0, asm.R1, size),
		}
	}
	program := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1), zeroKey}
	for _, v := range voids {
		program = append(program, lookup(v)...)
		program = append(program, count(asm.Word)...)
	}
	program = append(program, lookup(next)...)
	program = append(program, count(asm.DWord)...)
	program = append(program,
		asm.And.Imm(asm.R7, mask),
		asm.StoreMem(asm.R10, -4, asm.R7, asm.Word),
	)
	program = append(program, lookup(packets)...)
	return append(program,
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Reg(asm.R3, asm.R0),
		asm.Mov.Imm(asm.R4, head),
		asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.Mov.Imm(asm.R1, 0),
		asm.StoreMem(asm.R6, markOffset, asm.R1, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, target.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
		asm.Return(),
	)
}

const markOffset = 8 // of mark in struct __sk_buff

// skbContext is the beginning of struct __sk_buff, as BPF_PROG_TEST_RUN accepts it.
type skbContext struct {
	_       [10]uint32
	Ifindex uint32
	_       [37]uint32
}

// NewHook returns a hook of a program that is not one of a Bed. close releases what calls it.
func NewHook(name string, p *ebpf.Program, ifindex uint32, mac []byte) (h *Hook, close func() error, err error) {
	h = &Hook{Name: name, ifindex: ifindex, mac: mac}
	if h.target, err = callable(p); err != nil {
		return nil, nil, err
	}
	empty, err := newIdle()
	if err == nil {
		h.idle, err = callable(empty)
		err = errors.Join(err, empty.Close()) // the array keeps it
	}
	if err != nil {
		return nil, nil, errors.Join(err, h.target.Close())
	}
	return h, func() error { return errors.Join(h.target.Close(), h.idle.Close()) }, nil
}

// callable returns a program array for tail calls to the program.
func callable(p *ebpf.Program) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(
		&ebpf.MapSpec{Name: "bench_target", Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1},
	)
	if err != nil {
		return nil, err
	}
	if err := m.Put(uint32(0), p); err != nil {
		return nil, errors.Join(fmt.Errorf("call the program from another: %w", err), m.Close())
	}
	return m, nil
}

// newIdle returns an empty program with the verdict of a forwarded packet.
func newIdle() (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "bench_idle", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, Forwarded), asm.Return()},
	})
}

// run passes n packets to the program, on the CPU and in the namespace of the thread. It returns the CPU time per
// packet in ns, including the driver's time.
func (f *Frames) run(driver *ebpf.Program, n int, want uint32) (float64, error) {
	first := make([]byte, f.Size)
	copy(first, f.hook.mac) // so that the packet is addressed to the device
	copy(first[12:], []byte{0x86, 0xdd, 0x60})
	for {
		interrupted := false
		options := &ebpf.RunOptions{
			Data: first, Context: skbContext{Ifindex: f.hook.ifindex}, Repeat: uint32(n),
			Reset: func() { interrupted = true },
		}
		from, err := ThreadTime()
		if err != nil {
			return 0, err
		}
		verdict, err := driver.Run(options)
		if err != nil {
			return 0, err
		}
		to, err := ThreadTime()
		switch {
		case err != nil:
			return 0, err
		case verdict != want:
			return 0, fmt.Errorf("got verdict %d of a packet, want %d", int32(verdict), want)
		case !interrupted:
			return float64((to - from).Nanoseconds()) / float64(n), nil
		}
	}
}

// Time returns the time in ns that the hook's program alone takes per packet, as the mean of n packets, which must all
// have the wanted verdict. An additional first run warms the CPU's caches and does not count.
func (f *Frames) Time(n int, want uint32) (float64, error) {
	if _, err := f.run(f.idle, n, Forwarded); err != nil {
		return 0, err
	}
	without, err := f.run(f.idle, n, Forwarded)
	if err != nil {
		return 0, err
	}
	var before, after uint64
	if err := f.next.Lookup(uint32(0), &before); err != nil {
		return 0, err
	}
	with, err := f.run(f.driver, n, want)
	if err != nil {
		return 0, err
	}
	if err := f.next.Lookup(uint32(0), &after); err != nil {
		return 0, err
	}
	f.Sent += after - before
	return with - without, nil
}

// ThreadTime returns the CPU time of the calling thread.
func ThreadTime() (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano()), err
}
