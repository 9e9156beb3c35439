package policy

import (
	"fmt"
	"net/netip"
)

// Tier is one of the three tiers of policies, in the order of evaluation.
type Tier uint8

const (
	Admin         Tier = iota // ClusterNetworkPolicies that NetworkPolicies cannot override
	NetworkPolicy             // NetworkPolicies of namespaces
	Baseline                  // ClusterNetworkPolicies that NetworkPolicies override
)

// Action is the effect of a rule. Verdicts contain these numbers.
type Action uint8

const (
	None Action = iota
	Accept
	Deny
	Pass
)

// Direction is the direction of a connection, seen from the subject.
type Direction uint8

const (
	Ingress Direction = iota
	Egress
)

var directions = [2]Direction{Ingress, Egress}

func (d Direction) String() string { return [2]string{"ingress", "egress"}[d] }

// IP protocol numbers of the protocols that have ports.
const (
	TCP  = 6
	UDP  = 17
	SCTP = 132
)

// protocols maps the Kubernetes names of these protocols to their numbers.
var protocols = map[string]uint8{"TCP": TCP, "UDP": UDP, "SCTP": SCTP}

// A Policy is a NetworkPolicy or a ClusterNetworkPolicy.
type Policy struct {
	Tier      Tier
	Namespace string // NetworkPolicies only
	Name      string
	Priority  int  // ClusterNetworkPolicies only; the lowest comes first
	Audit     bool // count what the policy would drop, and do not drop it
	Subject   Pods
	Isolates  [2]bool // by Direction: a NetworkPolicy denies what no NetworkPolicy accepts
	Rules     [2][]Rule
}

// String returns the kind and name of the policy, which are unique in a tenant.
func (p *Policy) String() string {
	if p.Tier == NetworkPolicy {
		return "NetworkPolicy " + p.Namespace + "/" + p.Name
	}
	return "ClusterNetworkPolicy " + p.Name
}

// touches reports whether a policy applies to a direction.
func (p *Policy) touches(d Direction) bool { return p.Isolates[d] || len(p.Rules[d]) > 0 }

// Blocks returns the number of CIDRs in the rules, with those that are excluded.
func (p *Policy) Blocks() (n int) {
	for _, rules := range p.Rules {
		for _, r := range rules {
			for _, b := range r.Blocks {
				n += 1 + len(b.Except)
			}
		}
	}
	return n
}

// A Rule matches a connection whose peer is one of Everyone, Pods and Blocks, and whose port is one of Ports.
type Rule struct {
	Name     string // optional
	Action   Action
	Everyone bool // matches all peers
	Pods     []Pods
	Blocks   []Block
	Ports    []Port // empty: all ports of all protocols
}

// Pods selects containers of the tenant.
type Pods struct {
	Namespace  string   // only this namespace; empty: the namespaces that Namespaces selects
	Namespaces Selector // by the namespace's labels
	Labels     Selector // by the container's own
}

// all reports whether p selects every container, including those of unknown apps.
func (p Pods) all() bool { return p.Namespace == "" && len(p.Namespaces) == 0 && len(p.Labels) == 0 }

// A Selector selects the label sets that fulfil each requirement. An empty selector selects everything.
type Selector []Requirement

// Operator says how a Requirement compares a label.
type Operator uint8

const (
	In Operator = iota
	NotIn
	Exists
	DoesNotExist
)

// A Requirement is a condition on the label Key. NotIn is fulfilled if the label is absent.
type Requirement struct {
	Key      string
	Operator Operator
	Values   []string
}

// A Block selects peers by address.
type Block struct {
	Prefix netip.Prefix
	Except []netip.Prefix
}

// Port is a range of destination ports, or a named port.
type Port struct {
	Protocol    uint8  // 0: any protocol that has a port of this name
	First, Last uint16 // 0 to 65535: all ports of the protocol
	Name        string // in place of numbers: the destination container's name for the port
}

const maxPort = 1<<16 - 1

// A RuleName identifies the rule that a number refers to.
type RuleName struct {
	Policy    string
	Direction Direction
	Rule      int    // index in the policy's list of rules, or Isolation
	Name      string // optional
	Audit     bool   // the policy is in audit
}

// Isolation is the index of the implicit deny rule of a NetworkPolicy that isolates the container: it denies a packet
// that no rule accepts.
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
