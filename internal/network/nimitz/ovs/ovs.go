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

// Names of what is ours on a node, beside containers' devices.
const (
	bridgeName = "pil-nimitz"
	vxlanName  = "pil-vxlan"
)

// Config is of the switch of a node.
type Config struct {
	RunDir string           // of Open vSwitch, where its sockets are: /run/openvswitch
	Netns  *netns.Namespace // of the node; Open vSwitch runs in it
	Uplink string           // the node's device to the fabric
	Node   netip.Prefix     // its /64
	Region netip.Prefix     // where those of all its nodes are
	// of tunnels to and from the uplink, where programs stand that know their own by it: some of pipeline.MarkBits
	Mark     uint32
	Taps     Taps           // the node's own programs on containers' devices; nil where there are none
	Others   []netip.Prefix // sources of containers that another network gives, whose packets those programs judge
	Datapath Datapath       // Userspace unless it says Kernel
	// LooseDeletes takes entries away as NIMITZ did (§4): the switch searches for what matches, which takes the longer
	// the more it has.
	LooseDeletes bool
}

// Taps is told whose packets the switch has already when programs on the device see them. It drops of what the switch
// gives the device what that cannot tell.
type Taps interface {
	Plug(ctx context.Context, port pipeline.Port, device pipeline.Device) error
	Unplug(ctx context.Context, port pipeline.Port) error
	Check(ctx context.Context, device pipeline.Device) error
}

// Switch is a nimitz.Switch. Its calls may be made at once.
type Switch struct {
	config Config
	mu     sync.Mutex // of changes
	opened string     // the process that open was done with
	// Whose other end was told to rely on nobody.
	reliant map[pipeline.Port]pipeline.Device
}

// Open makes what a node's switch is made of, as far as it is missing: bridges, the VXLAN port, the way to the node's
// stack, and the flows that are always there. Entries and ports of a former run stay; ports whose device is gone go.
func Open(ctx context.Context, config Config) (*Switch, error) {
	config.Datapath = cmp.Or(config.Datapath, Userspace)
	s := &Switch{config: config, reliant: map[pipeline.Port]pipeline.Device{}}
	return s, s.open(ctx)
}

// Probe tells whether there is an Open vSwitch to open. It changes nothing.
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

// Leftovers is what Open has made on the node that the calling thread is in.
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

// Remove takes away all that Open made, and with it ports and entries. Containers' devices stay.
func Remove(ctx context.Context, config Config) error {
	s := &Switch{config: config}
	return s.withDatabase(ctx, func(d *database) error {
		return errors.Join(d.removeBridges(ctx, bridgeName, underlayName), s.removeUnderlay())
	})
}

// Plug makes a device a port, and may be repeated. Open vSwitch in user space fills in no checksums and cuts no
// segments: the container's side is told to do both itself.
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
	if s.config.Taps != nil {
		if err := s.config.Taps.Plug(ctx, port, is); err != nil {
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
				return fmt.Errorf("%s is the port of %s already; nothing was changed: unplug it first", other, is.of)
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
				fmt.Errorf("ovs-vswitchd gave it port %d in the place of %d: %s", is.ofport, of, is.wrong),
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

// Unplug has a port be none. A port that is not there is no error.
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
	if err == nil && s.config.Taps != nil {
		err = s.config.Taps.Unplug(ctx, port)
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

// sweep unplugs containers' devices that are gone: Open vSwitch keeps their ports.
func (s *Switch) sweep(ctx context.Context, d *database) error {
	all, err := d.interfaces(ctx)
	if err != nil {
		return err
	}
	if is := all[vxlanName]; is.ofport != ofportVXLAN {
		return fmt.Errorf("%s has port %d in the place of %d: %s", vxlanName, is.ofport, ofportVXLAN, is.wrong)
	}
	h, err := s.config.Netns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	for name := range all {
		if name == vxlanName {
			continue // not a device of the kernel's
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

// Plugged are the devices of ports.
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

// Apply takes entries away and adds others, all or nothing.
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
		return fmt.Errorf("%d entries to remove and %d to add: none was: %w", len(remove), len(add), err)
	}
	return s.abroad(ctx, remove, false)
}

// Check asks for one interface and for a flow an entry, by its cookie.
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
				cmp.Or(all[is.Name].wrong, "it is none of its ports"),
			)
		}
		return err
	})
	if err == nil {
		err = s.config.Netns.Do(
			func() error { _, err := netlink.LinkByName(is.Name); return err },
		) // a port stays when its device goes
	}
	if err == nil && s.config.Taps != nil {
		err = s.config.Taps.Check(ctx, is)
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
				return fmt.Errorf("the switch does not have %v", e)
			}
		}
		return nil
	})
}

func (s *Switch) changes(remove, add []pipeline.Entry) ([]openflow.Change, error) {
	gone := openflow.Change{Command: openflow.Delete}
	if s.config.LooseDeletes {
		// The cookie keeps a prefix's deletion from taking what lies in the prefix too.
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

// constants puts them in, and takes away those of another build or configuration.
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

// place is what a flow is found by. The switch tells a match in an order of its own.
func place(f openflow.Flow) string {
	match := slices.Clone(f.Match)
	slices.SortFunc(match, func(a, b openflow.Value) int { return cmp.Compare(a.String(), b.String()) })
	return openflow.Flow{Table: f.Table, Priority: f.Priority, Match: match}.String()
}

// Entries is what the switch holds, read from it.
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
		"containers on Open vSwitch are not told of packets out of hops or too long: traceroute does not show their " +
			"node",
		"ICMP errors about packets of services and publications are dropped (icmp-quote): a link behind the gateway " +
			"that is narrower than the uplink is not noticed",
		"no policies are enforced: containers of tenants that have some are refused, and those that are here already " +
			"are cut off",
	}
}

// PolicyError implements nimitz.Unpoliced.
func (s *Switch) PolicyError() error {
	return errors.New(
		"Open vSwitch carries its packets, which judges none: start the agent with --nimitz ebpf on nodes that are " +
			"to have containers of tenants with policies",
	)
}

// Drops counts the packets that were dropped, by reason.
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

// withBridge connects anew each time, so that it does not matter whether ovs-vswitchd has been started again.
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
