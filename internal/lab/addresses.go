package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// ContainerStatus is a running container, as its agent last reported it.
type ContainerStatus struct {
	Container
	App     uint32     `json:"app"`
	Address netip.Addr `json:"address"` // the address that the container sees, of its first attachment
	// the address that nodes and the fabric see; invalid if the container's networks have none
	Plaintext   netip.Addr   `json:"plaintext"`
	Attachments []Attachment `json:"attachments"`
}

// Attachment is a container's address on one network. While a tenant moves to another network, its containers have
// attachments of both.
type Attachment struct {
	Network   string     `json:"network"`
	Address   netip.Addr `json:"address"`
	Plaintext netip.Addr `json:"plaintext,omitzero"`
	OnFabric  netip.Addr `json:"onFabric,omitzero"` // if it is neither the plaintext nor encapsulated
}

// isOpaque reports whether the address does not reveal the container's node, and is unique among all tenants.
func (a Attachment) isOpaque() bool { return a.Plaintext.IsValid() && a.Plaintext != a.Address }

// Addresses returns all addresses that the container sees.
func (c ContainerStatus) Addresses() (all []netip.Addr) {
	for _, a := range c.Attachments {
		all = append(all, a.Address)
	}
	return all
}

func (c ContainerStatus) on(network string) bool {
	return slices.ContainsFunc(c.Attachments, func(a Attachment) bool { return a.Network == network })
}

// merge replaces the status with an agent's report.
func (c *ContainerStatus) merge(e *pilasterv1.Endpoint) (err error) {
	is := ContainerStatus{Container: c.Container, App: e.GetApp()}
	for i, attached := range e.GetAttachments() {
		a := Attachment{Network: attached.Network}
		if a.Address, err = netip.ParseAddr(attached.Address); err != nil {
			return err
		}
		if attached.Plaintext != "" {
			if a.Plaintext, err = netip.ParseAddr(attached.Plaintext); err != nil {
				return err
			}
			is.Plaintext = a.Plaintext
		}
		if attached.OnFabric != "" {
			if a.OnFabric, err = netip.ParseAddr(attached.OnFabric); err != nil {
				return err
			}
		}
		if i == 0 {
			is.Address = a.Address
		}
		is.Attachments = append(is.Attachments, a)
	}
	*c = is
	return nil
}

// agentPatience is how long an agent may take to list its containers.
const agentPatience = 2 * time.Second

// Refresh lists the endpoints of some nodes' agents, or of all if nodes is empty, and updates the containers'
// addresses, which change when a tenant moves to another network. If an agent does not respond, its containers keep
// their last known addresses, and Refresh returns the node.
func (l *Lab) Refresh(ctx context.Context, nodes ...string) (silent []string, err error) {
	if len(nodes) == 0 {
		nodes = l.state.Spec.AllNodes()
	}
	ctx, cancel := context.WithTimeout(ctx, agentPatience)
	defer cancel()
	answers := make([]*connect.Response[pilasterv1.ListEndpointsResponse], len(nodes))
	var asking sync.WaitGroup
	for i, node := range nodes {
		asking.Go(func() {
			answers[i], _ = l.Agent(node).ListEndpoints(ctx, connect.NewRequest(&pilasterv1.ListEndpointsRequest{}))
		})
	}
	asking.Wait()
	reports := map[string]*pilasterv1.Endpoint{}
	for i, node := range nodes {
		if answers[i] == nil {
			silent = append(silent, node)
			continue
		}
		for _, e := range answers[i].Msg.Endpoints {
			reports[e.ContainerId] = e
		}
	}
	return silent, l.merge(reports)
}

// merge updates containers from the agents' reports, by container ID.
func (l *Lab) merge(reports map[string]*pilasterv1.Endpoint) error {
	return l.change(func(all []ContainerStatus) ([]ContainerStatus, error) {
		for i := range all {
			c := &all[i]
			if e := reports[l.ContainerID(c.Name)]; e != nil {
				if err := c.merge(e); err != nil {
					return nil, fmt.Errorf("container %s: %w", c.Name, err)
				}
			}
		}
		return all, nil
	})
}

// refreshOf refreshes the nodes of containers; other names have fixed addresses.
func (l *Lab) refreshOf(ctx context.Context, names ...string) error {
	var nodes []string
	for _, name := range names {
		if c, err := l.Container(name); err == nil && !slices.Contains(nodes, c.Node) {
			nodes = append(nodes, c.Node)
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	_, err := l.Refresh(ctx, nodes...)
	return err
}

// between returns the addresses under which a container or node reaches another. For two containers, it returns one
// address for each network that both are on.
func (l *Lab) between(from, to string) ([]netip.Addr, error) {
	a, notFrom := l.Container(from)
	b, notTo := l.Container(to)
	var all []netip.Addr
	if notFrom == nil && notTo == nil {
		taken := map[string]bool{}
		for _, of := range b.Attachments {
			if !taken[of.Network] && a.on(of.Network) && l.reaches(a, b, of.Network) {
				all = append(all, of.Address)
			}
			taken[of.Network] = true
		}
	}
	if len(all) > 0 {
		return all, nil
	}
	if notTo == nil && b.Plaintext.IsValid() && from != b.Node && slices.Contains(l.NodeNames(), from) {
		return []netip.Addr{b.Plaintext}, nil // what processes of other nodes use
	}
	first, err := l.Address(to)
	return []netip.Addr{first}, err
}

// reaches reports whether a network connects the nodes of two containers: not all networks connect regions.
func (l *Lab) reaches(a, b ContainerStatus, network string) bool {
	return tenant.NetworkHas(network, tenant.Regions) || l.RegionOf(a.Node) == l.RegionOf(b.Node)
}

// Way is a pair of addresses by which a container reaches a destination.
type Way struct {
	From, To            ContainerStatus // To is empty if the destination is no container's address; a node has no name
	Source, Destination netip.Addr
}

// ErrFamily says that a container has no address of the family of a destination.
var ErrFamily = errors.New("no address of one family")

// WayTo returns the addresses from a container to another, on the first network that connects them, or to an address;
// or from a node to a container, or from a host outside to an address. An address of a container is resolved to it.
// WayTo takes only addresses of the sender that fit.
func (l *Lab) WayTo(ctx context.Context, from, to string, fits func(netip.Addr) bool) (w Way, err error) {
	if _, err := netip.ParseAddr(from); err == nil {
		return w, fmt.Errorf("%s is an address: name the container that sends; pilaster lab status lists them", from)
	}
	if slices.Contains(l.NodeNames(), from) {
		return l.wayFromNode(ctx, from, to)
	}
	if slices.Contains(l.OutsideNames(), from) {
		return l.wayFromOutside(from, to)
	}
	w.Destination, err = netip.ParseAddr(to)
	if named := err != nil; named {
		err = l.refreshOf(ctx, from, to)
	} else {
		_, err = l.Refresh(ctx)
	}
	if err != nil {
		return w, err
	}
	if w.From, err = l.Container(from); err != nil {
		return w, err
	}
	if w.Destination.IsValid() {
		var its Attachment
		if w.To, its = l.owner(w.Destination, w.From.Tenant); w.To.Name != "" {
			w.To.Attachments, w.To.Address, w.Destination = []Attachment{its}, its.Address, its.Address
		}
	} else if w.To, err = l.Container(to); err != nil {
		return w, err
	}
	if !w.choose(fits) {
		return w, w.noFamily(to)
	}
	if own := l.own(from, w.To.Name, w.Destination); own != "" && own != from {
		return w, fmt.Errorf("%v is the address of %s in tenant %s too, so a packet of %s goes to it; nothing was "+
			"sent: name %s", w.Destination, own, w.From.Tenant, from, own)
	}
	return w, nil
}

// wayFromNode is WayTo from a node to a container, whose network lets nodes reach it.
func (l *Lab) wayFromNode(ctx context.Context, from, to string) (w Way, err error) {
	if a, err := netip.ParseAddr(to); err == nil {
		if c, _ := l.owner(a, ""); c.Name != "" {
			to = c.Name
		}
	}
	if err := l.refreshOf(ctx, to); err != nil {
		return w, err
	}
	if w.To, err = l.Container(to); err != nil {
		return w, fmt.Errorf("%w; from a node, packets to containers are traced", err)
	}
	if !w.To.Plaintext.IsValid() {
		return w, fmt.Errorf("nodes reach containers of network %s, and %s is on none; nothing was sent",
			tenant.NetworksWith(tenant.Egress), to)
	}
	w.From.Node = from
	all, err := l.between(from, to)
	if err != nil {
		return w, err
	}
	w.Destination = all[0]
	w.Source, err = l.Address(from)
	return w, err
}

// choose chooses the addresses. It reports whether there are any.
func (w *Way) choose(fits func(netip.Addr) bool) bool {
	for _, own := range w.From.Attachments {
		if !fits(own.Address) {
			continue
		}
		if w.To.Name == "" && own.Address.Is4() == w.Destination.Is4() {
			w.Source = own.Address
			return true
		}
		for _, its := range w.To.Attachments {
			if its.Network == own.Network && its.Address.Is4() == own.Address.Is4() {
				w.Source, w.Destination = own.Address, its.Address
				return true
			}
		}
	}
	if w.To.Name != "" && w.From.Address.Is4() == w.To.Address.Is4() && fits(w.From.Address) {
		w.Source, w.Destination = w.From.Address, w.To.Address // of two networks; it will be dropped
		return true
	}
	return false
}

func (w *Way) noFamily(to string) error {
	why := ""
	if w.To.Name != "" && w.To.Tenant != w.From.Tenant {
		why = fmt.Sprintf("; they are of two tenants, %s and %s, which no network connects", w.From.Tenant, w.To.Tenant)
	}
	return fmt.Errorf("%w: %s has none of the family of %s%s; nothing was sent", ErrFamily, w.From.Name, to, why)
}

// owner returns the container with an address, as it or as the fabric sees it. An address that reveals no tenant is
// looked up in the given one. The name is empty if no container has it.
func (l *Lab) owner(of netip.Addr, tenant string) (ContainerStatus, Attachment) {
	for _, c := range l.Containers() {
		for _, a := range c.Attachments {
			if (a.Address == of || a.Plaintext == of) && (a.Plaintext.IsValid() || c.Tenant == tenant) {
				return c, a
			}
		}
	}
	return ContainerStatus{}, Attachment{}
}

// NodeWith returns the name of the node with a prefix, or "".
func (l *Lab) NodeWith(prefix string) string {
	for _, name := range l.state.Spec.AllNodes() {
		if p, err := l.Prefix(name); err == nil && p.String() == prefix {
			return name
		}
	}
	return ""
}
