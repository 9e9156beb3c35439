package oncache

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"pilaster.io/pilaster/internal/datapath"
)

// Config is the overlay of a node, and how much of it is remembered. Its tunnel may not have checksums in the
// outer UDP header, or nothing is ever learnt: headers are used again as they were.
type Config struct {
	Uplink  string // of the tunnel
	Address netip.Addr
	VNI     uint32 // 24 bits
	Port    uint16
	// The most that the tables hold; what was used last stays. 0: 4,096 connections, 1,024 containers elsewhere and
	// here.
	Connections, Remote, Local uint32
}

// Cache is one node's. It works for as long as it is open.
type Cache struct {
	objects oncacheObjects
	links   []link.Link
}

// Open loads the programs and puts those of the uplink in place, in the network namespace of the thread.
func Open(c Config) (*Cache, error) {
	spec, err := loadOncache()
	if err != nil {
		return nil, fmt.Errorf("oncache: read the programs: %w", err)
	}
	for name, value := range map[string]any{
		oncacheVarTunnelAddress: c.Address.As16(), oncacheVarTunnelVni: c.VNI, oncacheVarTunnelPort: c.Port,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("oncache: set %s: %w", name, err)
		}
	}
	orElse := func(n, usual uint32) uint32 {
		if n == 0 {
			return usual
		}
		return n
	}
	spec.Maps[oncacheMapOnceFilter].MaxEntries = orElse(c.Connections, 4096)
	spec.Maps[oncacheMapOnceEgress].MaxEntries = orElse(c.Remote, 1024)
	spec.Maps[oncacheMapOnceIngress].MaxEntries = orElse(c.Local, 1024)
	o := &Cache{}
	if err := spec.LoadAndAssign(&o.objects, nil); err != nil {
		return nil, fmt.Errorf("oncache: load the programs: %w", err)
	}
	err = errors.Join(
		o.attach(c.Uplink, ebpf.AttachTCXEgress, o.objects.OnceLearnOut),
		o.attach(c.Uplink, ebpf.AttachTCXIngress, o.objects.OnceIn))
	if err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return o, nil
}

// Join makes a container's packets use the cache: device is the node's side of its veth, in the namespace of the
// thread. What it learns in is not inside the container, where ONCache has it: there it would see every packet.
func (o *Cache) Join(device string) error {
	return errors.Join(
		o.attach(device, ebpf.AttachTCXEgress, o.objects.OnceLearnIn),
		o.attach(device, ebpf.AttachTCXIngress, o.objects.OnceOut))
}

func (o *Cache) attach(device string, hook ebpf.AttachType, program *ebpf.Program) error {
	d, err := net.InterfaceByName(device)
	if err != nil {
		return fmt.Errorf("oncache: %s: %w", device, err)
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: d.Index, Program: program, Attach: hook})
	if err != nil {
		return fmt.Errorf("oncache: attach to %v of %s: %w", hook, device, err)
	}
	o.links = append(o.links, l)
	return nil
}

// Close detaches the programs; packets use the network itself again.
func (o *Cache) Close() error {
	var errs []error
	for _, l := range o.links {
		errs = append(errs, l.Close())
	}
	o.links = nil
	return errors.Join(append(errs, o.objects.Close())...)
}

// Clear empties the cache: the next packet of each connection uses the network itself.
func (o *Cache) Clear() error {
	for _, m := range []*ebpf.Map{o.objects.OnceFilter, o.objects.OnceEgress, o.objects.OnceIngress} {
		if err := empty(m); err != nil {
			return fmt.Errorf("oncache: empty a table: %w", err)
		}
	}
	return nil
}

// empty deletes keys for as long as there are any: programs may add some meanwhile.
func empty(m *ebpf.Map) error {
	key := make([]byte, m.KeySize())
	for {
		switch err := m.NextKey(nil, key); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil
		case err != nil:
			return err
		}
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
}

// ProgramStats returns the statistics of the programs.
func (o *Cache) ProgramStats() (datapath.ProgStats, error) {
	return datapath.ProgStatsOf(o.objects.oncachePrograms)
}
