package service

import (
	"net/netip"
	"slices"
)

// Choice says which endpoints of a service the clients at one place get.
type Choice struct {
	Active   []Placed // get new connections
	Draining []Placed // get none, but TCP connections go on
	Excluded []Placed // have no connections
}

// Placed is an endpoint with the place where it is.
type Placed struct {
	Endpoint
	Node, Zone  string
	Unreachable bool   // its node does not answer
	Why         string // it gets no new connections; empty for active ones
}

// Reasons why an endpoint gets no new connections.
const (
	WhyUnreachable = "its node does not answer"
	WhyNotReady    = "not ready"
	WhyTerminating = "terminating"
	WhyOtherNode   = "on another node"
	WhyOtherZone   = "in another zone"
	WhyTwice       = "in another slice, too"
)

// Select applies the rules of Kubernetes. An endpoint is ready if its node answers, if it is not terminating, and if it
// is ready itself or the service publishes those that are not. If none is ready, terminating ones serve that are ready
// otherwise; if there are none either, those on nodes that do not answer: the orchestrator may be wrong. Of these, only
// those on the client's node or in its zone are active, if the service prefers them and there are any. The order is
// that of the slices.
func Select(s Service, all []Slice, node, zone string) (c Choice) {
	var ready, terminating, unreachable []Placed
	seen := map[netip.Addr]bool{}
	for _, slice := range all {
		for _, e := range slice.Endpoints {
			p := Placed{Endpoint: e, Node: slice.Node, Zone: slice.Zone, Unreachable: slice.Unreachable}
			serves := !e.NotReady || s.PublishNotReady
			switch {
			case seen[e.Address]:
				c.exclude(p, WhyTwice)
			case !serves && e.Terminating:
				c.drain(p, WhyTerminating+", "+WhyNotReady)
			case !serves:
				c.drain(p, WhyNotReady)
			case slice.Unreachable:
				unreachable = append(unreachable, p)
			case e.Terminating:
				terminating = append(terminating, p)
			default:
				ready = append(ready, p)
			}
			seen[e.Address] = true
		}
	}
	if len(ready) == 0 {
		ready, terminating = terminating, nil
	}
	if len(ready) == 0 {
		ready, unreachable = unreachable, nil
	}
	for _, p := range terminating {
		c.drain(p, WhyTerminating)
	}
	for _, p := range unreachable {
		c.drain(p, WhyUnreachable)
	}
	near, why := s.Distribution.near(node, zone)
	if !slices.ContainsFunc(ready, near) {
		c.Active = ready
		return c
	}
	for _, p := range ready {
		if near(p) {
			c.Active = append(c.Active, p)
		} else {
			c.drain(p, why)
		}
	}
	return c
}

// SelectExposed returns the endpoints that hosts outside of the cluster get whose connections come in by a node. The
// distribution has no effect on them. With policy Local the endpoints are those of the node's own slices, so a
// terminating one serves if none that is ready is on this node. Fixed endpoints are on no node.
func SelectExposed(s Service, all []Slice, node string) Choice {
	s.Distribution = Anywhere
	if s.TrafficPolicy == Local {
		all = slices.DeleteFunc(slices.Clone(all), func(of Slice) bool { return of.Node != node })
	}
	return Select(s, all, "", "")
}

func (c *Choice) drain(p Placed, why string) {
	p.Why = why
	c.Draining = append(c.Draining, p)
}

func (c *Choice) exclude(p Placed, why string) {
	p.Why = why
	c.Excluded = append(c.Excluded, p)
}

// near returns which endpoints a distribution prefers for clients at a place, and why it does not prefer the others.
func (d Distribution) near(node, zone string) (near func(Placed) bool, why string) {
	switch {
	case d == PreferSameNode && node != "":
		return func(p Placed) bool { return p.Node == node }, WhyOtherNode
	case d == PreferSameZone && zone != "":
		return func(p Placed) bool { return p.Zone == zone }, WhyOtherZone
	}
	return func(Placed) bool { return false }, ""
}

// Ready counts the endpoints that are ready for clients anywhere, and all endpoints.
func Ready(s Service, all []Slice) (ready, endpoints int) {
	s.Distribution = Anywhere
	c := Select(s, all, "", "")
	for _, p := range c.Active {
		if !p.Terminating && !p.Unreachable {
			ready++
		}
	}
	return ready, len(c.Active) + len(c.Draining) + len(c.Excluded)
}
