package tenant

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
)

// Capability is what a network's tenants have, or what its nodes need.
type Capability uint

const (
	// OwnCIDRs: a tenant has address ranges of its own. Other tenants can use the same addresses, which say neither
	// where a container is nor which app it has.
	OwnCIDRs Capability = 1 << iota
	// NorthSouth: containers reach underlay services, and clients there reach published containers, both
	// through the gateway of a node.
	NorthSouth
	// Regions: a tenant can span regions.
	Regions
	// Mappings: nodes have the location of each of a tenant's subnets or containers on other nodes.
	Mappings
	// PolicyAtReceiver: where a packet between containers arrives, the node applies the egress and ingress policies of
	// both ends, because no address names the app of the other end.
	PolicyAtReceiver
	// Identifiers: the cluster allocates addresses one by one, from a range that follows from the tenant's id. Mappings
	// contain the apps of containers.
	Identifiers
	// Tunnels: nodes exchange packets in a tunnel, whose endpoint is an address of each node.
	Tunnels
	// HostDevices: packets are forwarded at the containers' devices on the node, which macvlans do not have.
	HostDevices
	// AddressKeys: a container can have an address key, with which its address moves to another node.
	AddressKeys
	// Offloads: other nodes can look up a tenant's rules for the containers of a node (Nezha).
	Offloads
	// Announced: orchestrators with BGP peers announce the tenants' containers and nodes (EVPN), and import routes.
	Announced
	// Egress: containers reach hosts outside of the cluster, as egress rules allow, and processes of nodes.
	Egress
	// Services: a tenant can have services, each with one address for many containers.
	Services
)

// MaxAnnouncedID is the highest id of a tenant of a network with the capability Announced. A VNI has 24 bits, but a
// route distinguisher of the type that RFC 7432 §7.9 requires has 16 bits beside the VTEP's address. Ids are never
// reused, so a cluster that has had so many tenants, of any network, cannot have new ones of such a network.
const MaxAnnouncedID = 1<<16 - 1

// Traits describe a network's tenants.
type Traits struct {
	Name         string
	Addressings  []Addressing // what containers may see; the first is the default
	Capabilities Capability   // all of them, in one value
	About        string       // half a sentence: "on network NAME, ABOUT"
}

// Has reports whether the network has all of these capabilities.
func (t Traits) Has(c Capability) bool { return t.Capabilities&c == c }

// AddressingNames names what containers may see.
func (t Traits) AddressingNames() (names []string) {
	for _, a := range t.Addressings {
		names = append(names, string(a))
	}
	return names
}

// TraitsOf returns the traits of a network; false for one that this build does not know. No name means the default.
func TraitsOf(network string) (Traits, bool) {
	i := slices.IndexFunc(networks, func(t Traits) bool { return t.Name == cmp.Or(network, DefaultNetwork) })
	if i < 0 {
		return Traits{}, false
	}
	return networks[i], true
}

// NetworkHas reports whether a network has all of these capabilities; false for one that this build does not know.
func NetworkHas(network string, c Capability) bool {
	on, _ := TraitsOf(network)
	return on.Has(c)
}

// Networks returns the names of the networks with all of these capabilities, the default first.
func Networks(with ...Capability) []string {
	return namesOf(func(t Traits) bool { return hasAll(t, with) })
}

// NetworksWith names the networks with a capability, for a text.
func NetworksWith(c Capability) string { return OneOf(Networks(c)) }

// NetworksWithout names the other networks.
func NetworksWithout(c Capability) string {
	return OneOf(namesOf(func(t Traits) bool { return !t.Has(c) }))
}

// MoveOf returns the rule for a tenant's move between two networks. No name means the default.
func MoveOf(from, to string) Move {
	from, to = cmp.Or(from, DefaultNetwork), cmp.Or(to, DefaultNetwork)
	i := slices.IndexFunc(moves, func(m Move) bool { return m.From == from && m.To == to })
	if i < 0 {
		return Move{From: from, To: to, Refused: "this build has no way from one to the other"}
	}
	return moves[i]
}

// MovesFrom returns the networks that tenants of a network can move to.
func MovesFrom(from string) (to []string) {
	for _, n := range Networks() {
		if MoveOf(from, n).Refused == "" {
			to = append(to, n)
		}
	}
	return to
}

// Migrations returns the networks that tenants can leave, and those that they can move to.
func Migrations() (from, to []string) {
	for _, n := range Networks() {
		if all := MovesFrom(n); len(all) > 0 {
			from, to = append(from, n), append(to, all...)
		}
	}
	slices.Sort(to)
	return from, slices.Compact(to)
}

// WhyNot returns the reasons why tenants of other networks cannot move to a network, a line each.
func WhyNot(to string) (reasons []string) {
	for _, n := range Networks() {
		if m := MoveOf(n, to); n != to && m.Refused != "" {
			reasons = append(reasons, fmt.Sprintf("from %s: %s", n, m.Refused))
		}
	}
	return reasons
}

// About describes the networks for a help text, a line each.
func About() string {
	var b strings.Builder
	for _, t := range networks {
		fmt.Fprintf(&b, "  %-*s  %s\n", longestName(), t.Name, t.About)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func longestName() (n int) {
	for _, t := range networks {
		n = max(n, len(t.Name))
	}
	return n
}

// OneOf joins names: "a", "a or b", "a, b or c".
func OneOf(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

func hasAll(t Traits, with []Capability) bool {
	return !slices.ContainsFunc(with, func(c Capability) bool { return !t.Has(c) })
}

func namesOf(which func(Traits) bool) (names []string) {
	for _, t := range networks {
		if which(t) {
			names = append(names, t.Name)
		}
	}
	return names
}

// OnNetwork returns the name of the tenant's network.
func (t Tenant) OnNetwork() string { return cmp.Or(t.Network, DefaultNetwork) }

// KeepsAddresses reports whether the tenant moves between two networks with the same addresses.
func (t Tenant) KeepsAddresses() bool { return KeepsAddresses(t.Network, t.Leaving) }

// KeepsAddresses reports whether a tenant's containers keep their addresses when it moves between two networks; false
// if leaving is empty: then the tenant does not move.
func KeepsAddresses(network, leaving string) bool {
	return leaving != "" && MoveOf(leaving, network).KeepsAddresses
}

// has reports whether the tenant's network, or the one that it leaves, has a capability.
func (t Tenant) has(c Capability) bool {
	return NetworkHas(t.Network, c) || t.Leaving != "" && NetworkHas(t.Leaving, c)
}

// HasIdentifiers reports whether the tenant's network has the capability Identifiers.
func (t Tenant) HasIdentifiers() bool { return NetworkHas(t.Network, Identifiers) }

// PolicyAtReceiver reports whether nodes apply the policies of remote containers too, and so need those of all apps of
// the tenant.
func (t Tenant) PolicyAtReceiver() bool { return t.has(PolicyAtReceiver) }

// CheckNetwork refuses a tenant for whose containers this build cannot allocate addresses.
func (t Tenant) CheckNetwork() error {
	on, known := TraitsOf(t.Network)
	switch {
	case !known:
		return fmt.Errorf("is on network %q, which this build does not know", t.Network)
	case t.Leaving != "" && MoveOf(t.Leaving, t.Network).Refused != "":
		return fmt.Errorf("is on network %q and leaves %q, of which this build does not know how", t.Network, t.Leaving)
	case !slices.Contains(on.Addressings, t.Addressing),
		(t.has(OwnCIDRs) || t.has(Identifiers)) != (len(t.Overlays) > 0):
		return fmt.Errorf(
			"on network %s has %s addressing and %d CIDRs, which do not go together",
			t.Network,
			t.Addressing,
			len(t.Overlays),
		)
	case len(t.Overlays) == 0:
		return nil
	}
	return CheckOverlays(address.Plan{}, t.Overlays) // The orchestrator also checks the overlays against the plan.
}

// maxAddressKey is the maximum length of an address key in bytes.
const maxAddressKey = 128

// CheckAddressKey refuses an address key that cannot be transmitted unchanged. Without a key, "", it accepts all.
func CheckAddressKey(key string) error {
	if len(key) > maxAddressKey || strings.IndexFunc(key, notInKey) >= 0 {
		return fmt.Errorf("address key %.200q: at most %d letters, digits or . _ - / are allowed; nothing was changed",
			key, maxAddressKey)
	}
	return nil
}

// CheckKeyed refuses an address key of a container of a tenant on a network without address keys.
func CheckKeyed(name, network, key string) error {
	if key == "" || NetworkHas(network, AddressKeys) {
		return nil
	}
	return fmt.Errorf("address key %q: tenant %s is on network %s, where an address stays on its node; nothing was "+
		"changed: remove the key, or use a tenant on network %s", key, name, network, NetworksWith(AddressKeys))
}

// CheckPublishes refuses host ports of a container of a tenant on a network without services.
func CheckPublishes(name, network string, hostPorts int) error {
	if hostPorts == 0 || NetworkHas(network, Services) {
		return nil
	}
	return fmt.Errorf("the container has host ports, but tenant %s is on network %s, which has none; nothing was "+
		"changed: remove them (portMappings), or use a tenant on network %s", name, network, NetworksWith(Services))
}

// CheckKeyable refuses a tenant whose containers cannot have address keys, on a network with the capability: a key has
// one address, which does not belong to the subnet of a node.
func (t Tenant) CheckKeyable() error {
	why := ""
	switch {
	case t.Leaving != "":
		why = "it is migrating between networks " + t.OnNetwork() + " and " + t.Leaving + ": finish that first"
	case len(t.Overlays) != 1:
		why = fmt.Sprintf("it has %d CIDRs, and an address key has one address: use a tenant with one CIDR",
			len(t.Overlays))
	case t.Overlays[0].NodeBits != 0:
		why = "each node has a subnet of its CIDR, so an address stays on its node: use a tenant with " +
			"--no-node-cidrs (in a lab noNodeCIDRs)"
	default:
		return nil
	}
	return fmt.Errorf("tenant %s cannot have containers with address keys; nothing was changed: %s", t.Name, why)
}
