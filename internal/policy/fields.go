package policy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"pilaster.io/pilaster/internal/tenant"
)

// AuditAnnotation with the value "true" puts a policy in audit: it counts what it would drop, and drops nothing.
const AuditAnnotation = annotationPrefix + "audit"

const annotationPrefix = "pilaster.io/"

// fromMeta reads the metadata that both kinds have: the name, and whether the policy is in audit.
func fromMeta(m metav1.ObjectMeta, p *Policy) (wrong field.ErrorList) {
	path := field.NewPath("metadata")
	p.Name = m.Name
	if m.Name == "" {
		wrong = append(wrong, field.Required(path.Child("name"), ""))
	} else {
		wrong = append(wrong, invalid(path.Child("name"), m.Name, validation.IsDNS1123Subdomain(m.Name))...)
	}
	for _, key := range slices.Sorted(maps.Keys(m.Annotations)) {
		value, at := m.Annotations[key], path.Child("annotations").Key(key)
		switch {
		case !strings.HasPrefix(key, annotationPrefix):
		case key != AuditAnnotation:
			wrong = append(wrong, field.NotSupported(at, key, []string{AuditAnnotation}))
		case value != "true" && value != "false":
			wrong = append(wrong, field.NotSupported(at, value, []string{"true", "false"}))
		default:
			p.Audit = value == "true"
		}
	}
	return wrong
}

func invalid(path *field.Path, value any, messages []string) (wrong field.ErrorList) {
	for _, m := range messages {
		wrong = append(wrong, field.Invalid(path, value, m))
	}
	return wrong
}

// podSelector reads a selector by labels of containers. namespaceSelector reads a selector by labels of namespaces.
func podSelector(s metav1.LabelSelector, path *field.Path) (Selector, field.ErrorList) {
	out, wrong := namespaceSelector(s, path)
	for _, r := range out {
		switch {
		case tenant.IsPodLabel(r.Key):
		case tenant.IsIdentity(r.Key):
			wrong = append(
				wrong,
				field.Invalid(
					path,
					r.Key,
					"is not a label of the pod's own: select by namespaceSelector, or by the name of a port",
				),
			)
		default:
			wrong = append(
				wrong,
				field.Invalid(
					path,
					r.Key,
					"pods of one workload differ in it, so it is in no identity: select by a label that the "+
						"workload's pods have in common",
				),
			)
		}
	}
	return out, wrong
}

func namespaceSelector(s metav1.LabelSelector, path *field.Path) (out Selector, wrong field.ErrorList) {
	wrong = metavalidation.ValidateLabelSelector(&s, metavalidation.LabelSelectorValidationOptions{}, path)
	for _, key := range slices.Sorted(maps.Keys(s.MatchLabels)) {
		value := s.MatchLabels[key]
		wrong = append(
			wrong,
			invalid(path.Child("matchLabels").Key(key), value, validation.IsValidLabelValue(value))...)
		out = append(out, Requirement{Key: key, Operator: In, Values: []string{value}})
	}
	operators := map[metav1.LabelSelectorOperator]Operator{
		metav1.LabelSelectorOpIn: In, metav1.LabelSelectorOpNotIn: NotIn,
		metav1.LabelSelectorOpExists: Exists, metav1.LabelSelectorOpDoesNotExist: DoesNotExist,
	}
	for _, e := range s.MatchExpressions {
		out = append(out, Requirement{Key: e.Key, Operator: operators[e.Operator], Values: e.Values})
	}
	return out, wrong
}

// cidr reads a prefix. It rejects a prefix with bits set beyond its length, because its meaning is ambiguous.
// Kubernetes still accepts such prefixes.
func cidr(s string, path *field.Path) (netip.Prefix, field.ErrorList) {
	if wrong := validation.IsValidCIDR(path, s); len(wrong) > 0 {
		return netip.Prefix{}, wrong
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, field.ErrorList{field.Invalid(path, s, err.Error())}
	}
	return p, nil
}

func portNumber(n int32, path *field.Path) field.ErrorList {
	return invalid(path, n, validation.IsValidPortNum(int(n)))
}

func portName(s string, path *field.Path) field.ErrorList {
	return invalid(path, s, validation.IsValidPortName(s))
}

// atMost rejects a list that is longer than its kind allows.
func atMost[T any](list []T, n int, path *field.Path) field.ErrorList {
	if len(list) > n {
		return field.ErrorList{field.TooMany(path, len(list), n)}
	}
	return nil
}

// exactlyOne rejects documents that set none or several of the fields.
func exactlyOne(path *field.Path, there map[string]bool) field.ErrorList {
	var are []string
	for _, name := range slices.Sorted(maps.Keys(there)) {
		if there[name] {
			are = append(are, name)
		}
	}
	if len(are) == 1 {
		return nil
	}
	names := strings.Join(slices.Sorted(maps.Keys(there)), ", ")
	if len(are) == 0 {
		return field.ErrorList{field.Required(path, "one of "+names)}
	}
	return field.ErrorList{
		field.Forbidden(path, fmt.Sprintf("%s together: one of %s is allowed", strings.Join(are, " and "), names)),
	}
}
