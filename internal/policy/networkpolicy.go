package policy

import (
	"fmt"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"pilaster.io/pilaster/internal/tenant"
)

func fromNetworkPolicy(n *networkingv1.NetworkPolicy) (p Policy, wrong field.ErrorList) {
	p = Policy{Tier: NetworkPolicy, Namespace: n.Namespace}
	wrong = fromMeta(n.ObjectMeta, &p)
	if p.Namespace == "" {
		p.Namespace = tenant.DefaultNamespace
	}
	wrong = append(
		wrong,
		invalid(field.NewPath("metadata", "namespace"), p.Namespace, validation.IsDNS1123Label(p.Namespace))...)
	spec := field.NewPath("spec")
	subject, more := podSelector(n.Spec.PodSelector, spec.Child("podSelector"))
	wrong = append(wrong, more...)
	p.Subject = Pods{Namespace: p.Namespace, Labels: subject}
	p.Isolates, more = isolates(n.Spec, spec.Child("policyTypes"))
	wrong = append(wrong, more...)
	for i, in := range n.Spec.Ingress {
		r := ruleReader{p.Namespace, Ingress, spec.Child("ingress").Index(i)}
		rule, more := r.read(in.From, "from", in.Ports)
		p.Rules[Ingress], wrong = append(p.Rules[Ingress], rule), append(wrong, more...)
	}
	for i, out := range n.Spec.Egress {
		r := ruleReader{p.Namespace, Egress, spec.Child("egress").Index(i)}
		rule, more := r.read(out.To, "to", out.Ports)
		p.Rules[Egress], wrong = append(p.Rules[Egress], rule), append(wrong, more...)
	}
	for _, d := range directions {
		// Kubernetes ignores the rules of a direction that policyTypes omits.
		if !p.Isolates[d] {
			p.Rules[d] = nil
		}
	}
	return p, wrong
}

// isolates returns the directions that a policy applies to. Without policyTypes these are ingress, and egress if the
// policy has egress rules.
func isolates(spec networkingv1.NetworkPolicySpec, path *field.Path) (is [2]bool, wrong field.ErrorList) {
	if len(spec.PolicyTypes) == 0 {
		return [2]bool{Ingress: true, Egress: len(spec.Egress) > 0}, nil
	}
	wrong = atMost(spec.PolicyTypes, 2, path)
	for i, t := range spec.PolicyTypes {
		switch t {
		case networkingv1.PolicyTypeIngress:
			is[Ingress] = true
		case networkingv1.PolicyTypeEgress:
			is[Egress] = true
		default:
			wrong = append(
				wrong,
				field.NotSupported(
					path.Index(i),
					t,
					[]networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
				),
			)
		}
	}
	return is, wrong
}

// ruleReader reads the rules of a NetworkPolicy.
type ruleReader struct {
	namespace string
	direction Direction
	path      *field.Path
}

func (r ruleReader) read(
	peers []networkingv1.NetworkPolicyPeer,
	called string,
	ports []networkingv1.NetworkPolicyPort,
) (rule Rule, wrong field.ErrorList) {
	rule = Rule{Action: Accept, Everyone: len(peers) == 0}
	for i, peer := range peers {
		wrong = append(wrong, r.peer(&rule, peer, r.path.Child(called).Index(i))...)
	}
	for i, port := range ports {
		path := r.path.Child("ports").Index(i)
		read, more := readPort(port, path)
		rule.Ports, wrong = append(rule.Ports, read), append(wrong, more...)
		if r.direction == Egress && read.Name != "" && len(rule.Blocks) > 0 {
			wrong = append(
				wrong,
				field.Forbidden(
					path.Child("port"),
					fmt.Sprintf(
						"%q: addresses of an ipBlock have no names of ports: write its number, or a rule without "+
							"ipBlock",
						read.Name,
					),
				),
			)
		}
	}
	return rule, wrong
}

func (r ruleReader) peer(rule *Rule, peer networkingv1.NetworkPolicyPeer, path *field.Path) (wrong field.ErrorList) {
	pods := peer.PodSelector != nil || peer.NamespaceSelector != nil
	if wrong := exactlyOne(path,
		map[string]bool{"ipBlock": peer.IPBlock != nil, "podSelector or namespaceSelector": pods}); len(
		wrong,
	) > 0 {
		return wrong
	}
	if peer.IPBlock != nil {
		block, wrong := readBlock(*peer.IPBlock, path.Child("ipBlock"))
		rule.Blocks = append(rule.Blocks, block)
		return wrong
	}
	var p Pods
	if peer.PodSelector != nil {
		p.Labels, wrong = podSelector(*peer.PodSelector, path.Child("podSelector"))
	}
	if peer.NamespaceSelector != nil {
		var more field.ErrorList
		p.Namespaces, more = namespaceSelector(*peer.NamespaceSelector, path.Child("namespaceSelector"))
		wrong = append(wrong, more...)
	} else {
		p.Namespace = r.namespace
	}
	rule.Pods = append(rule.Pods, p)
	return wrong
}

func readBlock(b networkingv1.IPBlock, path *field.Path) (block Block, wrong field.ErrorList) {
	if block.Prefix, wrong = cidr(b.CIDR, path.Child("cidr")); len(wrong) > 0 {
		return block, wrong
	}
	for i, s := range b.Except {
		at := path.Child("except").Index(i)
		except, more := cidr(s, at)
		if wrong = append(wrong, more...); len(more) > 0 {
			continue
		}
		if except.Bits() <= block.Prefix.Bits() || !block.Prefix.Contains(except.Addr()) {
			wrong = append(wrong, field.Invalid(at, s, "must be a part of cidr, and not all of it"))
		}
		block.Except = append(block.Except, except)
	}
	return block, wrong
}

func readPort(p networkingv1.NetworkPolicyPort, path *field.Path) (port Port, wrong field.ErrorList) {
	port = Port{Protocol: TCP, Last: maxPort}
	if p.Protocol != nil {
		protocol, ok := protocols[string(*p.Protocol)]
		if port.Protocol = protocol; !ok {
			wrong = append(
				wrong,
				field.NotSupported(path.Child("protocol"), *p.Protocol, []string{"TCP", "UDP", "SCTP"}),
			)
		}
	}
	switch end := path.Child("endPort"); {
	case p.Port == nil:
		if p.EndPort != nil {
			wrong = append(wrong, field.Forbidden(end, "only with port, from which the range begins"))
		}
	case p.Port.Type == intstr.String:
		port.Name, port.Last = p.Port.StrVal, 0
		wrong = append(wrong, portName(port.Name, path.Child("port"))...)
		if p.EndPort != nil {
			wrong = append(wrong, field.Forbidden(end, "only with the number of a port, not with its name"))
		}
	default:
		last := p.Port.IntVal
		wrong = append(wrong, portNumber(last, path.Child("port"))...)
		if p.EndPort != nil {
			if last = *p.EndPort; last < p.Port.IntVal {
				wrong = append(wrong, field.Invalid(end, last, "must not be below port"))
			}
			wrong = append(wrong, portNumber(last, end)...)
		}
		port.First, port.Last = uint16(p.Port.IntVal), uint16(last)
	}
	return port, wrong
}
