package policy

import (
	"fmt"
	"net/netip"
)

// A Tier is one of three that are asked in this order.
type Tier uint8

const (
	Admin         Tier = iota // ClusterNetworkPolicies that nothing overrides
	NetworkPolicy             // NetworkPolicies of namespaces
	Baseline                  // ClusterNetworkPolicies that NetworkPolicies override
)

// An Action is what a rule does. The numbers are those of verdicts.
type Action uint8

const (
	None Action = iota
	Accept
	Deny
	Pass
)

// A Direction is that of a connection, seen from the subject.
type Direction uint8

const (
	Ingress Direction = iota
	Egress
)

var directions = [2]Direction{Ingress, Egress}

func (d Direction) String() string { return [2]string{"ingress", "egress"}[d] }

// Protocols that have ports.
const (
	TCP  = 6
	UDP  = 17
	SCTP = 132
)

// protocols are those names as Kubernetes writes them.
var protocols = map[string]uint8{"TCP": TCP, "UDP": UDP, "SCTP": SCTP}

// A Policy is a NetworkPolicy or a ClusterNetworkPolicy.
type Policy struct {
	Tier      Tier
	Namespace string // of a NetworkPolicy
	Name      string
	Priority  int  // of a ClusterNetworkPolicy: the lower goes first
	Audit     bool // what it would drop is counted and not dropped
	Subject   Pods
	Isolates  [2]bool // by Direction: what no rule of a NetworkPolicy accepts is denied
	Rules     [2][]Rule
}

// String is what people call a policy; no two of a tenant are called the same.
func (p *Policy) String() string {
	if p.Tier == NetworkPolicy {
		return "NetworkPolicy " + p.Namespace + "/" + p.Name
	}
	return "ClusterNetworkPolicy " + p.Name
}

// touches tells whether a policy has a say in a direction.
func (p *Policy) touches(d Direction) bool { return p.Isolates[d] || len(p.Rules[d]) > 0 }

// A Rule matches a connection with any of its peers at any of its ports.
type Rule struct {
	Name     string // if it has one
	Action   Action
	Everyone bool // peers are not asked for
	Pods     []Pods
	Blocks   []Block
	Ports    []Port // none: all, of all protocols
}

// Pods select containers of the tenant.
type Pods struct {
	Namespace  string   // in this namespace alone; empty: in those that Namespaces selects
	Namespaces Selector // by the namespace's labels
	Labels     Selector // by the container's own
}

// all tells whether everyone is selected, also who is not known.
func (p Pods) all() bool { return p.Namespace == "" && len(p.Namespaces) == 0 && len(p.Labels) == 0 }

// A Selector selects by labels that fulfil each requirement; without any, everything.
type Selector []Requirement

// Operator is what a Requirement asks of a label.
type Operator uint8

const (
	In Operator = iota
	NotIn
	Exists
	DoesNotExist
)

// A Requirement asks something of the label with a key. NotIn is fulfilled where there is no such label.
type Requirement struct {
	Key      string
	Operator Operator
	Values   []string
}

// A Block is peers by their addresses.
type Block struct {
	Prefix netip.Prefix
	Except []netip.Prefix
}

// Port is ports of the connection's destination.
type Port struct {
	Protocol    uint8  // 0: whichever has a port of that name
	First, Last uint16 // 0 to 65535: all of the protocol
	Name        string // instead of the numbers: what the destination's container calls so
}

const maxPort = 1<<16 - 1

// A RuleName says which rule a number stands for.
type RuleName struct {
	Policy    string
	Direction Direction
	Rule      int    // its place in the policy's list; Isolation
	Name      string // if it has one
	Audit     bool   // the policy is in audit
}

// Isolation is the place of the rule that stands for: a NetworkPolicy isolates the container, and no rule accepts.
const Isolation = -1

func (n RuleName) String() string {
	if n.Rule == Isolation {
		return fmt.Sprintf("%s isolates in %s, and no rule accepts", n.Policy, n.Direction)
	}
	s := fmt.Sprintf("%s %s[%d]", n.Policy, n.Direction, n.Rule)
	if n.Name != "" {
		s += fmt.Sprintf(" %q", n.Name)
	}
	return s
}
