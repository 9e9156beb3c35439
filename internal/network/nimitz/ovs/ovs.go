package ovs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/openflow"
)

// Names of our devices and bridges on a node, besides containers' devices.
const (
	bridgeName = "pil-nimitz"
	vxlanName  = "pil-vxlan"
)

// Config configures the switch of a node.
type Config struct {
	RunDir  string           // of Open vSwitch, where its sockets are: /run/openvswitch
	Netns   *netns.Namespace // of the node; Open vSwitch runs in it too
	Uplinks []string         // the node's devices to the fabric
	Node    netip.Prefix     // its /64
	Region  netip.Prefix     // contains the /64s of all nodes of the region
	// mark of tunnel packets, by which the programs on the uplink recognise them; some of pipeline.MarkBits
	Mark     uint32
	OVSPorts OVSPorts       // the node's own programs on containers' devices; nil where there are none
	Others   []netip.Prefix // source prefixes of another network's containers, whose packets these programs check
	Datapath Datapath       // default: Userspace
	// LooseDeletes removes entries as NIMITZ did (§4): the switch searches for matching entries, which takes longer the
	// more it has.
	LooseDeletes bool
}

// OVSPorts tells the programs on containers' devices which devices are ports of the switch: the switch handles their
// packets before the programs see them. The programs drop packets from the switch that they cannot attribute.
type OVSPorts interface {
	Plug(ctx context.Context, port pipeline.Port, device pipeline.Device) error
	Unplug(ctx context.Context, port pipeline.Port) error
	Check(ctx context.Context, device pipeline.Device) error
}

// Switch implements nimitz.Switch. Its methods may be called concurrently.
type Switch struct {
	config Config
	mu     sync.Mutex // serialises changes
	opened string     // the daemon that Open has configured
	// The devices whose peers compute checksums and segments themselves.
	reliant map[pipeline.Port]pipeline.Device
}

// Open creates the missing parts of a node's switch: bridges, the VXLAN port, the path to the node's stack, and the
// constant flows. Entries and ports of an earlier run stay, except ports whose device is gone.
func Open(ctx context.Context, config Config) (*Switch, error) {
	config.Datapath = cmp.Or(config.Datapath, Userspace)
	s := &Switch{config: config, reliant: map[pipeline.Port]pipeline.Device{}}
	return s, s.open(ctx)
}

// Probe reports whether there is an Open vSwitch to open. It changes nothing.
func Probe(ctx context.Context, runDir string) error {
	if _, err := ask(ctx, runDir, "version"); err != nil {
		return fmt.Errorf("open vswitch: %s in %s does not answer: %w", daemonName, runDir, err)
	}
	d, err := openDatabase(ctx, runDir)
	if err != nil {
		return fmt.Errorf("open vswitch: %w", err)
	}
	d.close()
	return nil
}

func (s *Switch) open(ctx context.Context) (err error) {
	if s.opened, err = daemon(s.config.RunDir); err != nil {
		return fmt.Errorf("open vswitch: %w; is it running with --ovs-run-dir %s?", err, s.config.RunDir)
	}
	err = s.withDatabase(ctx, func(d *database) error {
		if err := s.underlay(ctx, d); err != nil {
			return err
		}
		udp, extensions := s.tunnelPort()
		tunnel := map[string]string{
			"remote_ip": "flow",
			"local_ip":  pipeline.VTEP(s.config.Node).String(),
			"key":       "flow",
			"csum":      "true",
			"dst_port":  strconv.Itoa(udp),
		}
		maps.Copy(tunnel, extensions)
		err := d.ensureBridge(ctx, bridgeName, s.config.Datapath, nil, device{
			name: vxlanName, kind: "vxlan", of: pipeline.VXLAN.String(), ofport: ofportVXLAN, options: tunnel,
		})
		if err != nil {
			return err
		}
		return s.sweep(ctx, d)
	})
	if err != nil {
		return fmt.Errorf("open vswitch: %w", err)
	}
	if err := errors.Join(s.routes(ctx), s.constants(ctx)); err != nil {
		return fmt.Errorf("open vswitch: %w", err)
	}
	return nil
}

// Leftovers returns what Open has created on the node of the calling thread.
func Leftovers(runDir string) ([]network.StaleState, error) {
	if _, err := netlink.LinkByName(hostSide); errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("find %s: %w", hostSide, err)
	}
	return []network.StaleState{{Kind: "bridges", Name: bridgeName + " and " + underlayName, Remove: func() error {
		ns, err := netns.Current()
		if err != nil {
			return err
		}
		defer ns.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return Remove(ctx, Config{RunDir: runDir, Netns: ns})
	}}}, nil
}

// Remove removes all that Open created, with its ports and entries. Containers' devices stay.
func Remove(ctx context.Context, config Config) error {
	s := &Switch{config: config}
	return s.withDatabase(ctx, func(d *database) error {
		return errors.Join(d.removeBridges(ctx, bridgeName, underlayName), s.removeUnderlay())
	})
}

// Plug makes a device a port. It may be repeated. The userspace datapath computes no checksums and no segments, so Plug
// makes the container's side do both.
func (s *Switch) Plug(ctx context.Context, port pipeline.Port, is pipeline.Device) error {
	name := is.Name
	of, err := ofport(port)
	if err == nil && s.config.Datapath != Kernel {
		err = selfReliant(is)
	}
	if err != nil {
		return fmt.Errorf("plug %s: %w", name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.config.Datapath != Kernel && is.Netns != "" {
		s.reliant[port] = is
	}
	if s.config.OVSPorts != nil {
		if err := s.config.OVSPorts.Plug(ctx, port, is); err != nil {
			return err
		}
	}
	err = s.withDatabase(ctx, func(d *database) error {
		all, err := d.interfaces(ctx)
		if err != nil {
			return err
		}
		for other, is := range all {
			switch {
			case other == name && is.of == port.String() && is.ofport == int(of):
				return nil
			case other == name || is.of == port.String():
				return fmt.Errorf("%s is already the port of %s; nothing was changed: unplug it first", other, is.of)
			}
		}
		if err := d.change(ctx, addPort(where("name", bridgeName),
			device{name: name, of: port.String(), ofport: of})...); err != nil {
			return err
		}
		if all, err = d.interfaces(ctx); err != nil {
			return err
		}
		if is := all[name]; is.ofport != int(of) {
			return errors.Join(
				fmt.Errorf("ovs-vswitchd assigned port %d instead of %d: %s", is.ofport, of, is.wrong),
				d.removePort(ctx, name),
			)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("plug %s as %v: %w", name, port, err)
	}
	return nil
}

// Unplug removes a port. A missing port is no error.
func (s *Switch) Unplug(ctx context.Context, port pipeline.Port) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.withDatabase(ctx, func(d *database) error {
		all, err := d.interfaces(ctx)
		if err != nil {
			return err
		}
		for name, is := range all {
			if is.of == port.String() {
				return d.removePort(ctx, name)
			}
		}
		return nil
	})
	if err == nil && s.config.OVSPorts != nil {
		err = s.config.OVSPorts.Unplug(ctx, port)
	}
	if is, plugged := s.reliant[port]; err == nil && plugged {
		if err = s.relieve(is); err == nil {
			delete(s.reliant, port)
		}
	}
	if err != nil {
		return fmt.Errorf("unplug %v: %w", port, err)
	}
	return nil
}

// sweep unplugs containers' devices that are gone, because Open vSwitch keeps their ports.
func (s *Switch) sweep(ctx context.Context, d *database) error {
	all, err := d.interfaces(ctx)
	if err != nil {
		return err
	}
	if is := all[vxlanName]; is.ofport != ofportVXLAN {
		return fmt.Errorf("%s has port %d instead of %d: %s", vxlanName, is.ofport, ofportVXLAN, is.wrong)
	}
	h, err := s.config.Netns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	for name := range all {
		if name == vxlanName {
			continue // not a kernel device
		}
		if _, err := h.LinkByName(name); errors.As(err, new(netlink.LinkNotFoundError)) {
			err = d.removePort(ctx, name)
			if err != nil {
				return err
			}
		} else if err != nil {
			return err
		}
	}
	return nil
}

// Plugged returns the device of each port.
func (s *Switch) Plugged(ctx context.Context) (map[pipeline.Port]string, error) {
	ports := map[pipeline.Port]string{}
	err := s.withDatabase(ctx, func(d *database) error {
		all, err := d.interfaces(ctx)
		for name, is := range all {
			if p := portOf(uint64(is.ofport)); is.of == p.String() && p != pipeline.VXLAN {
				ports[p] = name
			}
		}
		return err
	})
	return ports, err
}

// Apply removes and adds entries, all or nothing.
func (s *Switch) Apply(ctx context.Context, remove, add []pipeline.Entry) error {
	changes, err := s.changes(remove, add)
	if err != nil {
		return fmt.Errorf("entries: nothing was changed: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err = s.abroad(ctx, add, true)
	if err == nil {
		err = s.withBridge(ctx, bridgeName, func(c *openflow.Conn) error { return c.Apply(ctx, changes) })
	}
	if err != nil {
		return fmt.Errorf("%d entries to remove and %d to add: nothing was changed: %w", len(remove), len(add), err)
	}
	return s.abroad(ctx, remove, false)
}

// Check compares one interface, and one flow for each entry, found by its cookie.
func (s *Switch) Check(ctx context.Context, port pipeline.Port, is pipeline.Device, entries []pipeline.Entry) error {
	of, err := ofport(port)
	if err != nil {
		return err
	}
	err = s.withDatabase(ctx, func(d *database) error {
		all, err := d.interfaces(ctx, where("name", is.Name))
		if err == nil && (all[is.Name].of != port.String() || all[is.Name].ofport != int(of)) {
			err = fmt.Errorf(
				"device %s is not %v of the switch: %s",
				is.Name,
				port,
				cmp.Or(all[is.Name].wrong, "it is not a port"),
			)
		}
		return err
	})
	if err == nil {
		err = s.config.Netns.Do(
			func() error { _, err := netlink.LinkByName(is.Name); return err },
		) // a port stays when its device is deleted
	}
	if err == nil && s.config.OVSPorts != nil {
		err = s.config.OVSPorts.Check(ctx, is)
	}
	if err != nil {
		return err
	}
	return s.withBridge(ctx, bridgeName, func(c *openflow.Conn) error {
		for _, e := range entries {
			want, err := render(s.config.Region, e)
			if err != nil {
				return err
			}
			found, err := c.Flows(ctx, want.Cookie, ^uint64(0))
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(
				found,
				func(f openflow.Flow) bool { is, err := parse(f); return err == nil && is == e },
			) {
				return fmt.Errorf("the switch lacks %v", e)
			}
		}
		return nil
	})
}

func (s *Switch) changes(remove, add []pipeline.Entry) ([]openflow.Change, error) {
	gone := openflow.Change{Command: openflow.Delete}
	if s.config.LooseDeletes {
		// The cookie restricts the deletion of a prefix to this entry: longer prefixes in it stay.
		gone = openflow.Change{Command: openflow.DeleteLoose, CookieMask: cookieLoose}
	}
	var all []openflow.Change
	for _, e := range remove {
		f, err := render(s.config.Region, e)
		if err != nil {
			return nil, err
		}
		gone.Flow = s.fit(f)
		all = append(all, gone)
	}
	for _, e := range add {
		f, err := render(s.config.Region, e)
		if err != nil {
			return nil, err
		}
		all = append(all, openflow.Change{Command: openflow.Add, Flow: s.fit(f)})
	}
	return all, nil
}

// constants adds the constant flows, and removes those of another build or configuration.
func (s *Switch) constants(ctx context.Context) error {
	return s.withBridge(ctx, bridgeName, func(c *openflow.Conn) error {
		is, err := c.Flows(ctx, cookieOurs, cookieMask|0xff<<cookieKind)
		if err != nil {
			return err
		}
		want := map[string]bool{}
		var changes []openflow.Change
		for _, f := range constants(s.config.Region, s.config.Others...) {
			f = s.fit(f)
			want[place(f)] = true
			changes = append(changes, openflow.Change{Command: openflow.Add, Flow: f})
		}
		for _, f := range is {
			if !want[place(f)] {
				changes = append(changes, openflow.Change{Command: openflow.Delete, Flow: f})
			}
		}
		return c.Apply(ctx, changes)
	})
}

// place returns the key of a flow. It sorts the match, because the switch returns the fields in a different order.
func place(f openflow.Flow) string {
	match := slices.Clone(f.Match)
	slices.SortFunc(match, func(a, b openflow.Value) int { return cmp.Compare(a.String(), b.String()) })
	return openflow.Flow{Table: f.Table, Priority: f.Priority, Match: match}.String()
}

// Entries returns the entries that the switch holds, read from it.
func (s *Switch) Entries(ctx context.Context) ([]pipeline.Entry, error) {
	flows, err := s.flows(ctx, cookieOurs, cookieMask)
	if err != nil {
		return nil, err
	}
	var all []pipeline.Entry
	for _, f := range flows {
		if kindOf(f.Cookie) == constant {
			continue
		}
		e, err := parse(f)
		if err != nil {
			return nil, fmt.Errorf("entries of Open vSwitch: %w", err)
		}
		all = append(all, e)
	}
	return all, nil
}

// Lacks implements nimitz.Lacking.
func (s *Switch) Lacks() []string {
	return []string{
		"containers on Open vSwitch receive no ICMP errors for an exceeded hop limit or MTU: traceroute does not " +
			"show their node",
		"ICMP errors about packets of services and publications are dropped (icmp-quote): path MTU discovery fails " +
			"if a link behind the gateway is narrower than the uplink",
		"no policies are enforced: containers of tenants with policies are refused, and existing ones are " +
			"isolated",
	}
}

// PolicyError implements nimitz.PolicyGuard.
func (s *Switch) PolicyError() error {
	return errors.New(
		"Open vSwitch forwards its packets and applies no policy: start the agent with --nimitz ebpf on nodes for " +
			"containers of tenants with policies",
	)
}

// Drops returns the dropped packets by reason.
func (s *Switch) Drops(ctx context.Context) (map[dropreason.Reason]uint64, error) {
	flows, err := s.flows(ctx, cookieOurs, cookieMask|0xff<<cookieKind)
	if err != nil {
		return nil, err
	}
	all := map[dropreason.Reason]uint64{}
	for _, f := range flows {
		if f.Table == tableDrops {
			all[dropreason.Reason(values(f)[regReason].Uint())] = f.Packets
		}
	}
	return all, nil
}

func (s *Switch) flows(ctx context.Context, cookie, mask uint64) (all []openflow.Flow, err error) {
	err = s.withBridge(ctx, bridgeName, func(c *openflow.Conn) (err error) {
		all, err = c.Flows(ctx, cookie, mask)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("flows of Open vSwitch: %w", err)
	}
	return all, nil
}

// withBridge opens a new connection each time, so that a restart of ovs-vswitchd does not matter.
func (s *Switch) withBridge(ctx context.Context, name string, do func(*openflow.Conn) error) error {
	c, err := openflow.Dial(ctx, filepath.Join(s.config.RunDir, name+".mgmt"))
	if err != nil {
		return err
	}
	defer c.Close()
	return do(c)
}

func (s *Switch) withDatabase(ctx context.Context, do func(*database) error) error {
	d, err := openDatabase(ctx, s.config.RunDir)
	if err != nil {
		return err
	}
	defer d.close()
	return do(d)
}
