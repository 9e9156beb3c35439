package policy

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"
)

// Upstream's limits of a ClusterNetworkPolicy: rules of a direction, and peers, protocols and networks of a rule.
const (
	maxListed   = 25
	maxRuleName = 100
	maxPriority = 1000
)

// clusterPolicy is upstream's type, except that it distinguishes a missing priority from 0.
type clusterPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              clusterSpec                         `json:"spec"`
	Status            v1alpha2.ClusterNetworkPolicyStatus `json:"status"`
}

type clusterSpec struct {
	Tier     v1alpha2.Tier                              `json:"tier"`
	Priority *int32                                     `json:"priority"`
	Subject  v1alpha2.ClusterNetworkPolicySubject       `json:"subject"`
	Ingress  []v1alpha2.ClusterNetworkPolicyIngressRule `json:"ingress"`
	Egress   []v1alpha2.ClusterNetworkPolicyEgressRule  `json:"egress"`
}

func fromClusterPolicy(c *clusterPolicy) (p Policy, wrong field.ErrorList) {
	wrong = fromMeta(c.ObjectMeta, &p)
	if c.Namespace != "" {
		wrong = append(wrong, field.Forbidden(field.NewPath("metadata", "namespace"), "is for all namespaces"))
	}
	spec := field.NewPath("spec")
	switch c.Spec.Tier {
	case v1alpha2.AdminTier:
		p.Tier = Admin
	case v1alpha2.BaselineTier:
		p.Tier = Baseline
	default:
		wrong = append(
			wrong,
			field.NotSupported(
				spec.Child("tier"),
				c.Spec.Tier,
				[]v1alpha2.Tier{v1alpha2.AdminTier, v1alpha2.BaselineTier},
			),
		)
	}
	if n := c.Spec.Priority; n == nil {
		wrong = append(wrong, field.Required(spec.Child("priority"), "0 to 1000, the lower goes first"))
	} else if p.Priority = int(*n); p.Priority < 0 || p.Priority > maxPriority {
		wrong = append(wrong, field.Invalid(spec.Child("priority"), *n, "must be 0 to 1000"))
	}
	subject, more := clusterPods(c.Spec.Subject.Namespaces, c.Spec.Subject.Pods, spec.Child("subject"), nil)
	p.Subject, wrong = subject, append(wrong, more...)
	wrong = append(wrong, atMost(c.Spec.Ingress, maxListed, spec.Child("ingress"))...)
	for i, in := range c.Spec.Ingress {
		path := spec.Child("ingress").Index(i)
		rule, more := clusterRule(in.Name, in.Action, in.Protocols, path)
		wrong = append(append(wrong, more...), listed(in.From, path.Child("from"))...)
		for j, peer := range in.From {
			pods, more := clusterPods(peer.Namespaces, peer.Pods, path.Child("from").Index(j), nil)
			rule.Pods, wrong = append(rule.Pods, pods), append(wrong, more...)
		}
		p.Rules[Ingress] = append(p.Rules[Ingress], rule)
	}
	wrong = append(wrong, atMost(c.Spec.Egress, maxListed, spec.Child("egress"))...)
	for i, out := range c.Spec.Egress {
		path := spec.Child("egress").Index(i)
		rule, more := clusterRule(out.Name, out.Action, out.Protocols, path)
		wrong = append(append(wrong, more...), listed(out.To, path.Child("to"))...)
		for j, peer := range out.To {
			wrong = append(wrong, clusterPeer(&rule, peer, path.Child("to").Index(j))...)
		}
		if len(rule.Blocks) > 0 {
			wrong = append(wrong, noNames(rule, path.Child("protocols"))...)
		}
		p.Rules[Egress] = append(p.Rules[Egress], rule)
	}
	return p, wrong
}

// listed rejects a list that is empty or longer than upstream allows.
func listed[T any](list []T, path *field.Path) field.ErrorList {
	if len(list) == 0 {
		return field.ErrorList{field.Required(path, "1 to 25 are allowed")}
	}
	return atMost(list, maxListed, path)
}

func clusterRule(
	name string,
	action v1alpha2.ClusterNetworkPolicyRuleAction,
	protocols []v1alpha2.ClusterNetworkPolicyProtocol,
	path *field.Path,
) (r Rule, wrong field.ErrorList) {
	r.Name = name
	if len(name) > maxRuleName {
		wrong = append(wrong, field.TooLong(path.Child("name"), name, maxRuleName))
	}
	switch action {
	case v1alpha2.ClusterNetworkPolicyRuleActionAccept:
		r.Action = Accept
	case v1alpha2.ClusterNetworkPolicyRuleActionDeny:
		r.Action = Deny
	case v1alpha2.ClusterNetworkPolicyRuleActionPass:
		r.Action = Pass
	default:
		wrong = append(wrong, field.NotSupported(path.Child("action"), action, []string{"Accept", "Deny", "Pass"}))
	}
	if protocols != nil { // A missing list means all protocols. An empty list is an error.
		wrong = append(wrong, listed(protocols, path.Child("protocols"))...)
	}
	for i, p := range protocols {
		port, more := clusterPort(p, path.Child("protocols").Index(i))
		r.Ports, wrong = append(r.Ports, port), append(wrong, more...)
	}
	return r, wrong
}

// clusterPods reads a subject or a peer. others are the fields that are allowed in place of namespaces and pods.
func clusterPods(
	namespaces *metav1.LabelSelector,
	pods *v1alpha2.NamespacedPod,
	path *field.Path,
	others map[string]bool,
) (p Pods, wrong field.ErrorList) {
	there := map[string]bool{"namespaces": namespaces != nil, "pods": pods != nil}
	for name, is := range others {
		there[name] = is
	}
	if wrong = exactlyOne(path, there); len(wrong) > 0 {
		return p, wrong
	}
	if namespaces != nil {
		p.Namespaces, wrong = namespaceSelector(*namespaces, path.Child("namespaces"))
	}
	if pods != nil {
		var more field.ErrorList
		p.Namespaces, wrong = namespaceSelector(pods.NamespaceSelector, path.Child("pods", "namespaceSelector"))
		p.Labels, more = podSelector(pods.PodSelector, path.Child("pods", "podSelector"))
		wrong = append(wrong, more...)
	}
	return p, wrong
}

func clusterPeer(r *Rule, peer v1alpha2.ClusterNetworkPolicyEgressPeer, path *field.Path) (wrong field.ErrorList) {
	switch {
	case peer.Nodes != nil:
		return field.ErrorList{
			field.Forbidden(path.Child("nodes"), "peers that are nodes are not supported: write their networks"),
		}
	case peer.DomainNames != nil:
		return field.ErrorList{
			field.Forbidden(path.Child("domainNames"), "egress to names is not supported; use networks"),
		}
	}
	pods, wrong := clusterPods(peer.Namespaces, peer.Pods, path, map[string]bool{"networks": peer.Networks != nil})
	if len(wrong) > 0 {
		return wrong
	}
	if peer.Networks == nil {
		r.Pods = append(r.Pods, pods)
		return nil
	}
	wrong = listed(peer.Networks, path.Child("networks"))
	seen := map[v1alpha2.CIDR]bool{}
	for i, s := range peer.Networks {
		at := path.Child("networks").Index(i)
		if seen[s] {
			wrong = append(wrong, field.Duplicate(at, s))
		}
		seen[s] = true
		prefix, more := cidr(string(s), at)
		r.Blocks, wrong = append(r.Blocks, Block{Prefix: prefix}), append(wrong, more...)
	}
	return wrong
}

func clusterPort(p v1alpha2.ClusterNetworkPolicyProtocol, path *field.Path) (port Port, wrong field.ErrorList) {
	if wrong = exactlyOne(path,
		map[string]bool{"tcp": p.TCP != nil, "udp": p.UDP != nil, "sctp": p.SCTP != nil,
			"destinationNamedPort": p.DestinationNamedPort != ""}); len(
		wrong,
	) > 0 {
		return port, wrong
	}
	if name := p.DestinationNamedPort; name != "" {
		return Port{Name: name}, portName(name, path.Child("destinationNamedPort"))
	}
	var destination *v1alpha2.Port
	switch {
	case p.TCP != nil:
		port.Protocol, destination, path = TCP, p.TCP.DestinationPort, path.Child("tcp")
	case p.UDP != nil:
		port.Protocol, destination, path = UDP, p.UDP.DestinationPort, path.Child("udp")
	default:
		port.Protocol, destination, path = SCTP, p.SCTP.DestinationPort, path.Child("sctp")
	}
	path = path.Child("destinationPort")
	if destination == nil {
		return port, field.ErrorList{field.Required(path, "for all ports of it, write the range 1 to 65535")}
	}
	if wrong = exactlyOne(path,
		map[string]bool{"number": destination.Number != 0, "range": destination.Range != nil}); len(
		wrong,
	) > 0 {
		return port, wrong
	}
	first, last := destination.Number, destination.Number
	if r := destination.Range; r != nil {
		if first, last = r.Start, r.End; first >= last {
			wrong = append(wrong, field.Invalid(path.Child("range", "end"), last, "must be above start"))
		}
	}
	wrong = append(append(wrong, portNumber(first, path)...), portNumber(last, path)...)
	port.First, port.Last = uint16(first), uint16(last)
	return port, wrong
}

// noNames rejects named ports in a rule with peers by address.
func noNames(r Rule, path *field.Path) (wrong field.ErrorList) {
	for i, p := range r.Ports {
		if p.Name != "" {
			wrong = append(
				wrong,
				field.Forbidden(
					path.Index(i).Child("destinationNamedPort"),
					"addresses of networks have no names of ports: write tcp, udp or sctp with a number",
				),
			)
		}
	}
	return wrong
}
