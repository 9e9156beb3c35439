package suites

import (
	"context"
	"errors"
	"fmt"
	"os/exec"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/steering"
)

// steeringBed is a network whose second node counts the packets that each CPU processes, at the ingress hook of each
// level: steering comes before that hook.
type steeringBed struct {
	wire     *scenario.Wire
	pairs    []scenario.Pair
	counters map[string]*ebpf.Map // by level: packets of each CPU
	closes   []func() error
}

// newSteeringBed builds a VXLAN network with pairs of client and server.
func newSteeringBed(dir string, pairs int) (*steeringBed, error) {
	return buildSteeringBed(dir, func(b *steeringBed) (counted []steering.Device, err error) {
		if b.pairs, err = b.wire.OverlayPairs(pairs); err != nil {
			return nil, err
		}
		return b.devices(steering.Levels())
	})
}

// buildSteeringBed builds a network, and counts the packets of the devices that build returns.
func buildSteeringBed(
	dir string,
	build func(*steeringBed) ([]steering.Device, error),
) (_ *steeringBed, err error) {
	b := &steeringBed{counters: map[string]*ebpf.Map{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	if b.wire, err = scenario.NewWire(dir); err != nil {
		return nil, err
	}
	counted, err := build(b)
	if err != nil {
		return nil, err
	}
	for _, d := range counted {
		if err := b.count(d); err != nil {
			return nil, fmt.Errorf("count packets of %v: %w", d, err)
		}
	}
	return b, nil
}

// devices returns the devices of some levels of the servers' node.
func (b *steeringBed) devices(levels []string) ([]steering.Device, error) {
	of := steering.Selection{Levels: levels, Netns: b.wire.Nodes[1].NS.Path(), Uplinks: []string{"eth0"}}
	for _, l := range levels {
		if l == steering.Container {
			for _, p := range b.pairs {
				of.Containers = append(of.Containers, p.Server.Path())
			}
		}
	}
	return of.Devices()
}

// count attaches a program that counts packets at the ingress of a device. All devices of a level share a map.
func (b *steeringBed) count(d steering.Device) error {
	counter := b.counters[d.Level]
	if counter == nil {
		var err error
		counter, err = ebpf.NewMap(&ebpf.MapSpec{
			Name: "packets", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 8, MaxEntries: 1,
		})
		if err != nil {
			return err
		}
		b.counters[d.Level] = counter
		b.closes = append(b.closes, counter.Close)
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "count", Type: ebpf.SchedCLS, License: "GPL", Instructions: counting(counter),
	})
	if err != nil {
		return err
	}
	defer p.Close() // the device keeps a reference
	ns, err := netns.Open(d.Netns)
	if err != nil {
		return err
	}
	defer ns.Close()
	return scenario.OnDevice(ns, d.Name, func(_ *netlink.Handle, device netlink.Link) error {
		return ns.Do(func() error {
			l, err := link.AttachTCX(link.TCXOptions{
				Interface: device.Attrs().Index, Program: p, Attach: ebpf.AttachTCXIngress,
			})
			if err == nil {
				b.closes = append(b.closes, l.Close)
			}
			return err
		})
	})
}

// counting adds one to the CPU's element of the map, and passes the packet on.
func counting(counter *ebpf.Map) asm.Instructions {
	const next = -1
	return asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, counter.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, next).WithSymbol("pass"),
		asm.Return(),
	}
}

// packets returns the packets of each CPU, by level.
func (b *steeringBed) packets() (map[string][]uint64, error) {
	all := map[string][]uint64{}
	for level, counter := range b.counters {
		var each []uint64
		if err := counter.Lookup(uint32(0), &each); err != nil {
			return nil, fmt.Errorf("packets of level %s: %w", level, err)
		}
		all[level] = each
	}
	return all, nil
}

// clear sets all counters to 0.
func (b *steeringBed) clear() error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	for level, counter := range b.counters {
		if err := counter.Put(uint32(0), make([]uint64, cpus)); err != nil {
			return fmt.Errorf("clear the packets of level %s: %w", level, err)
		}
	}
	return nil
}

func (b *steeringBed) Close() error {
	var errs []error
	for _, f := range b.closes {
		errs = append(errs, f())
	}
	if b.wire != nil {
		errs = append(errs, b.wire.Close())
	}
	return errors.Join(errs...)
}

// start starts a generator in a namespace and on a CPU. Ctrl-C at a terminal does not reach it: only the benchmark gets
// the signal.
func (m *steeringMeter) start(
	ctx context.Context,
	ns *netns.Namespace,
	cpu int,
	j traffic.Job,
) (*traffic.Process, error) {
	return traffic.Start(m.Generator(ctx), func(c *exec.Cmd) error {
		c.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
		return ns.Do(func() error {
			if cpu != anyCPU {
				var set unix.CPUSet
				set.Set(cpu)
				if err := unix.SchedSetaffinity(0, &set); err != nil {
					return fmt.Errorf("pin to CPU %d: %w", cpu, err)
				}
			}
			return c.Start()
		})
	}, j)
}
