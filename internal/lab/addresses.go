package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// ContainerStatus is a container that is up, as its agent last reported it.
type ContainerStatus struct {
	Container
	App     uint32     `json:"app"`
	Address netip.Addr `json:"address"` // what the container sees; the first of its attachments'
	// what nodes and the fabric see; not valid where its networks show them no address
	Plaintext   netip.Addr   `json:"plaintext"`
	Attachments []Attachment `json:"attachments"`
}

// Attachment is an address that a container has of a network. While its tenant moves it has some of both.
type Attachment struct {
	Network   string     `json:"network"`
	Address   netip.Addr `json:"address"`
	Plaintext netip.Addr `json:"plaintext,omitzero"`
}

// hides reports whether the address says nothing of where the container is, and means the same to no other tenant.
func (a Attachment) hides() bool { return a.Plaintext.IsValid() && a.Plaintext != a.Address }

// Addresses are all that the container sees.
func (c ContainerStatus) Addresses() (all []netip.Addr) {
	for _, a := range c.Attachments {
		all = append(all, a.Address)
	}
	return all
}

func (c ContainerStatus) on(network string) bool {
	return slices.ContainsFunc(c.Attachments, func(a Attachment) bool { return a.Network == network })
}

// learn takes what an agent says of a container.
func (c *ContainerStatus) learn(e *pilasterv1.Endpoint) (err error) {
	is := ContainerStatus{Container: c.Container, App: e.GetApp()}
	for i, told := range e.GetAttachments() {
		a := Attachment{Network: told.Network}
		if a.Address, err = netip.ParseAddr(told.Address); err != nil {
			return err
		}
		if told.Plaintext != "" {
			if a.Plaintext, err = netip.ParseAddr(told.Plaintext); err != nil {
				return err
			}
			is.Plaintext = a.Plaintext
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

// Refresh asks the agents of nodes, or of all, which addresses their containers have by now: they change when a tenant
// moves to another network. Where no agent answers they stay as they were known; those nodes are returned.
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
	told := map[string]*pilasterv1.Endpoint{}
	for i, node := range nodes {
		if answers[i] == nil {
			silent = append(silent, node)
			continue
		}
		for _, e := range answers[i].Msg.Endpoints {
			told[e.ContainerId] = e
		}
	}
	return silent, l.learn(told)
}

// learn takes what agents say, by the containers' ids.
func (l *Lab) learn(told map[string]*pilasterv1.Endpoint) error {
	return l.change(func(all []ContainerStatus) ([]ContainerStatus, error) {
		for i := range all {
			c := &all[i]
			if e := told[l.ContainerID(c.Name)]; e != nil {
				if err := c.learn(e); err != nil {
					return nil, fmt.Errorf("container %s: %w", c.Name, err)
				}
			}
		}
		return all, nil
	})
}

// refreshOf is Refresh for the nodes of containers; other names have no addresses that change.
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

// between are the addresses by which somebody sends to another: of two containers, one of each network that both are
// on.
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
	first, err := l.Address(to)
	return []netip.Addr{first}, err
}

// reaches tells whether a network leads from one container's node to the other's: only nimitz does between regions.
func (l *Lab) reaches(a, b ContainerStatus, network string) bool {
	return network == tenant.Nimitz || l.RegionOf(a.Node) == l.RegionOf(b.Node)
}
