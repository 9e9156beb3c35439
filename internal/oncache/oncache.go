package oncache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath"
)

// Cache is the cache of one node. It works until Close, while Renew is called. Its programs are not pinned: they end
// with the process. All methods may be called concurrently.
type Cache struct {
	objects oncacheObjects
	uplink  []link.Link
	config  Config

	mu      sync.Mutex
	devices map[string]container
	// Generations of learn marks (0: none, from 1 to lastMark) and of filter entries, as the programs have them.
	marks, filter uint32
	nextMark      uint32
	evicted       uint64
	barrier       atomic.Uint64
}

// container is a device that Join attached programs to.
type container struct {
	index uint32
	links []link.Link
}

// Open loads the programs, and attaches those of the uplink in the network namespace of the thread. The programs use
// and fill the cache only after Renew.
func Open(c Config) (*Cache, error) {
	spec, err := loadOncache()
	if err != nil {
		return nil, fmt.Errorf("oncache: read the programs: %w", err)
	}
	return open(spec, c.withDefaults())
}

func open(spec *ebpf.CollectionSpec, c Config) (*Cache, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	if err := c.set(spec); err != nil {
		return nil, err
	}
	o := &Cache{config: c, devices: map[string]container{}}
	if err := spec.LoadAndAssign(&o.objects, nil); err != nil {
		return nil, fmt.Errorf("oncache: load the programs: %w", err)
	}
	o.resume()
	if err := o.publish(); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	uplink, err := attach(c.Uplink, o.objects.OnceIn, o.objects.OnceLearnOut)
	if err != nil {
		return nil, errors.Join(err, o.Close())
	}
	o.uplink = uplink
	return o, nil
}

// set writes the constants of the programs and the sizes of the maps.
func (c Config) set(spec *ebpf.CollectionSpec) error {
	device, err := linkByName(c.Device)
	if err != nil {
		return err
	}
	if err := checkDevice(device); err != nil {
		return err
	}
	mac := make([]byte, 8)
	copy(mac, device.Attrs().HardwareAddr)
	for name, value := range map[string]any{
		oncacheVarTunnelAddress: c.Address.As16(),
		oncacheVarTunnelVni:     c.VNI,
		oncacheVarTunnelPort:    c.Port,
		oncacheVarOverlayDevice: uint32(device.Attrs().Index),
		oncacheVarOverlayMac:    binary.NativeEndian.Uint64(mac),
		oncacheVarValidFor:      uint64(c.TTL),
		oncacheVarMarkMask:      c.MarkMask,
		oncacheVarMarkShift:     uint32(bits.TrailingZeros32(c.MarkMask)),
		oncacheVarTracks:        c.Tracks,
		oncacheVarRouted:        !c.Bridged,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("oncache: set %s: %w", name, err)
		}
	}
	spec.Maps[oncacheMapOnceFilter].MaxEntries = c.Flows
	spec.Maps[oncacheMapOnceEgress].MaxEntries = c.Remote
	spec.Maps[oncacheMapOnceVtep].MaxEntries = c.Remote
	spec.Maps[oncacheMapOnceIngress].MaxEntries = c.Local
	spec.Maps[oncacheMapOnceSender].MaxEntries = c.Local
	return nil
}

// attach attaches programs to a device of the thread's namespace: all of them or none.
func attach(device string, in, out *ebpf.Program) ([]link.Link, error) {
	d, err := linkByName(device)
	if err != nil {
		return nil, err
	}
	return attachTo(d, in, out)
}

func attachTo(d netlink.Link, in, out *ebpf.Program) ([]link.Link, error) {
	var links []link.Link
	for _, a := range []struct {
		hook    ebpf.AttachType
		program *ebpf.Program
	}{{ebpf.AttachTCXIngress, in}, {ebpf.AttachTCXEgress, out}} {
		l, err := link.AttachTCX(link.TCXOptions{Interface: d.Attrs().Index, Program: a.program, Attach: a.hook})
		if err != nil {
			err = fmt.Errorf("oncache: attach to %v of %s: %w", a.hook, d.Attrs().Name, err)
			return nil, errors.Join(err, detach(links))
		}
		links = append(links, l)
	}
	return links, nil
}

func detach(links []link.Link) error {
	var errs []error
	for _, l := range links {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// Join makes a container's packets use the cache. device is the node's side of the container's veth, in the namespace
// of the thread; index is its index, because another device can have the name meanwhile. Unlike ONCache, Join attaches
// the program that learns from incoming packets to this side, and not inside the container, where it would process
// every packet. A device with the name of one that has joined before replaces it.
func (o *Cache) Join(device string, index int) error {
	d, err := linkByName(device)
	if err != nil {
		return err
	}
	if is := d.Attrs().Index; is != index {
		return fmt.Errorf("oncache: device %s with index %d is gone; another one has its name", device, index)
	}
	o.mu.Lock()
	had := o.devices[device]
	o.mu.Unlock()
	if err := o.Leave(device, int(had.index)); err != nil {
		return err
	}
	links, err := attachTo(d, o.objects.OnceOut, o.objects.OnceLearnIn)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.devices[device] = container{uint32(index), links}
	return nil
}

// Leave undoes Join and evicts what leads to the device, which may be gone. A device that has not joined is no error.
func (o *Cache) Leave(device string, index int) error {
	o.mu.Lock()
	c, ok := o.devices[device]
	if ok = ok && c.index == uint32(index); ok {
		delete(o.devices, device)
	}
	o.mu.Unlock()
	if !ok {
		return nil
	}
	detached := detach(c.links) // first: what has left cannot be learnt again
	_, err := o.Evict(Selector{Device: c.index})
	return errors.Join(detached, err)
}

// Close detaches the programs. All packets then pass the overlay's own devices again.
func (o *Cache) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	errs := []error{detach(o.uplink)}
	for _, c := range o.devices {
		errs = append(errs, detach(c.links))
	}
	o.uplink, o.devices = nil, nil
	return errors.Join(append(errs, o.objects.Close())...)
}

// ProgramStats returns the statistics of the programs.
func (o *Cache) ProgramStats() (datapath.ProgStats, error) {
	return datapath.ProgStatsOf(o.objects.oncachePrograms)
}

// Selector says what Evict removes: everything, what concerns a container's address, a VTEP, the node's side of a
// container's veth, or the MAC to which the overlay sends inner frames. If several fields are set, Evict removes what
// any of them selects.
type Selector struct {
	All    bool
	Inner  netip.Addr
	VTEP   netip.Addr
	Device uint32  // ifindex, 0: none
	MAC    [6]byte // zeros: none
}
