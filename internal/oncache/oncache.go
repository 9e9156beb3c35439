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

// Config describes a node's tunnel and the sizes of the cache. The tunnel must send outer UDP headers without a
// checksum: the cache reuses these headers unchanged, and learns none that has a checksum.
type Config struct {
	Uplink  string // of the tunnel
	Address netip.Addr
	VNI     uint32 // 24 bits
	Port    uint16
	// Maximum numbers of entries: connections (0 means 4,096), containers on other nodes and containers on this node (0
	// means 1,024). A full map evicts the least recently used entries.
	Connections, Remote, Local uint32
}

// Cache is the cache of one node. It works until Close.
type Cache struct {
	objects oncacheObjects
	links   []link.Link
}

// Open loads the programs, and attaches those of the uplink in the network namespace of the thread.
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

// Join makes a container's packets use the cache. device is the node's side of the container's veth, in the namespace
// of the thread. Unlike ONCache, Join attaches the program that learns from incoming packets to this side, and not
// inside the container, where it would process every packet.
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

// Close detaches the programs. All packets then pass the network's own devices again.
func (o *Cache) Close() error {
	var errs []error
	for _, l := range o.links {
		errs = append(errs, l.Close())
	}
	o.links = nil
	return errors.Join(append(errs, o.objects.Close())...)
}

// Clear empties the cache. The next packets of each connection pass the network's own devices.
func (o *Cache) Clear() error {
	for _, m := range []*ebpf.Map{o.objects.OnceFilter, o.objects.OnceEgress, o.objects.OnceIngress} {
		if err := empty(m); err != nil {
			return fmt.Errorf("oncache: empty a table: %w", err)
		}
	}
	return nil
}

// empty deletes keys until there are none, because programs may add keys meanwhile.
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
