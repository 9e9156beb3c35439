package cniserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/tenant"
)

// Annotations of a pod.
const (
	tenantAnnotation = "pilaster.io/tenant"
	labelsAnnotation = "pilaster.io/labels" // "app=web,tier=front"
	portsAnnotation  = "pilaster.io/ports"  // "http=80/TCP,dns=53/UDP": names of the pod's ports
	keyAnnotation    = "pilaster.io/address-key"
)

// trust is what the configuration permits annotations to set, because the author of a pod need not have authority over
// tenants.
type trust string

const (
	trustNone   trust = "none"   // the annotations have no effect
	trustLabels trust = "labels" // they add labels; the tenant is that of the configuration
	trustAll    trust = "all"    // they also select a tenant that the configuration allows
)

// decodeTrust decodes the keys "allowedTenants" and "annotations".
func (f *fileConfig) decodeTrust() error {
	for _, key := range []struct {
		name, want string
		raw        json.RawMessage
		value      any
	}{
		{"allowedTenants", "a list of names", f.RawAllowed, &f.AllowedTenants},
		{"annotations", `"none", "labels" or "all"`, f.RawAnnotations, &f.Annotations},
	} {
		if key.raw == nil {
			continue
		}
		if err := json.Unmarshal(key.raw, key.value); err != nil {
			return fmt.Errorf("%q is %.80s, not %s; nothing was changed: correct the network configuration", key.name,
				key.raw, key.want)
		}
	}
	return nil
}

// trust returns the value of the key "annotations", or its default.
func (f *fileConfig) trust() (trust, error) {
	switch t := f.Annotations; t {
	case trustNone, trustLabels, trustAll:
		return t, nil
	case "":
		if len(f.AllowedTenants) > 0 {
			return trustAll, nil
		}
		return trustLabels, nil
	}
	return "", fmt.Errorf(
		`"annotations" is %.40q; nothing was changed: use "none", "labels" or "all" in the network configuration`,
		f.Annotations,
	)
}

// Ignored returns the names of the pod's annotations that have no effect because of the configuration.
func (c Config) Ignored() (names []string) {
	if c.file.decodeTrust() != nil || c.file.Annotations != trustNone {
		return nil
	}
	for _, name := range []string{tenantAnnotation, labelsAnnotation, portsAnnotation, keyAnnotation} {
		if _, ok := c.file.RuntimeConfig.Annotations[name]; ok {
			names = append(names, name)
		}
	}
	return names
}

// tenantOf returns the tenant of a pod with these annotations.
func (f *fileConfig) tenantOf(annotations map[string]string, trusted trust) (string, error) {
	for _, name := range f.AllowedTenants {
		if err := tenant.CheckName(name); err != nil {
			return "", fmt.Errorf(`"allowedTenants": %w`, err)
		}
	}
	name, annotated := annotations[tenantAnnotation]
	switch {
	case !annotated && f.Tenant != "":
		return f.Tenant, nil
	case !annotated && trusted == trustAll && len(f.AllowedTenants) > 0:
		return "", fmt.Errorf(
			`no tenant is given; nothing was changed: set the annotation %s of the pod to one of %s, or "tenant" in `+
				"the network configuration",
			tenantAnnotation,
			strings.Join(f.AllowedTenants, ", "),
		)
	case !annotated && f.Annotations != "" && f.Annotations != trustAll:
		return "", errors.New(`no tenant is given; nothing was changed: set "tenant" in the network configuration`)
	case !annotated:
		return "", errors.New(
			`no tenant is given; nothing was changed: set "tenant" in the network configuration, or list in ` +
				`"allowedTenants" the tenants that the annotation ` + tenantAnnotation + " of a pod may name",
		)
	case f.Tenant != "" && name == f.Tenant:
		return name, nil
	case trusted == trustAll && slices.Contains(f.AllowedTenants, name):
		return name, nil
	case trusted == trustLabels && len(f.AllowedTenants) > 0:
		return "", fmt.Errorf(
			`annotation %s: %.80q is refused, because "annotations" of the network configuration is "labels"; nothing `+
				`was changed: remove the annotation, or set "annotations" to "all"`,
			tenantAnnotation,
			name,
		)
	}
	allowed := slices.DeleteFunc(
		append([]string{f.Tenant}, f.AllowedTenants...),
		func(name string) bool { return name == "" },
	)
	if len(allowed) == 0 {
		return "", fmt.Errorf(
			"annotation %s: %.80q is refused, because the network configuration allows no tenant; nothing was "+
				`changed: set "tenant" or "allowedTenants" in the network configuration`,
			tenantAnnotation,
			name,
		)
	}
	return "", fmt.Errorf(
		"annotation %s: %.80q is refused, because the network configuration allows only %s; nothing was changed: "+
			`correct the annotation, or add the tenant to "allowedTenants" in the network configuration`,
		tenantAnnotation,
		name,
		strings.Join(allowed, ", "),
	)
}

// labelsOf returns the labels of the configuration, plus labels for the annotations, the namespace and the named ports.
func (c Config) labelsOf(annotations, labels map[string]string) (map[string]string, error) {
	more, err := tenant.ParseLabels(annotations[labelsAnnotation])
	if err != nil {
		return nil, fmt.Errorf("annotation %s: %w", labelsAnnotation, err)
	}
	if says := tenant.SaysNamespace(more); says != "" && c.namespace != "" {
		return nil, fmt.Errorf(
			"annotation %s: a pod may not set %s; the runtime reports namespace %s",
			labelsAnnotation,
			says,
			c.namespace,
		)
	}
	place := tenant.Place{Namespace: c.namespace}
	if place.Ports, err = tenant.ParsePorts(annotations[portsAnnotation]); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", portsAnnotation, err)
	}
	ports := tenant.Place{Ports: place.Ports}.With(nil)
	if _, err := add(labels, ports, portsAnnotation); err != nil {
		return nil, err
	}
	if labels, err = add(labels, more, labelsAnnotation); err != nil {
		return nil, err
	}
	return place.With(labels), nil
}

// add returns the labels of the configuration plus those of an annotation. The annotation may not change a label.
func add(labels, more map[string]string, annotation string) (map[string]string, error) {
	all := map[string]string{}
	maps.Copy(all, labels)
	for _, k := range slices.Sorted(maps.Keys(more)) {
		if was, ok := all[k]; ok && was != more[k] {
			return nil, fmt.Errorf(
				"annotation %s: label %s is %q there and %q in the network configuration; nothing was changed: remove "+
					"it from the annotation, or from the network configuration",
				annotation,
				k,
				more[k],
				was,
			)
		}
		all[k] = more[k]
	}
	return all, nil
}

// AddressKey returns the address key of the container: that of the configuration, or that of the annotation.
func (c Config) AddressKey() (string, error) {
	if err := c.file.decodeTrust(); err != nil {
		return "", err
	}
	trusted, err := c.file.trust()
	if err != nil {
		return "", err
	}
	key, annotated := c.file.RuntimeConfig.Annotations[keyAnnotation]
	if !annotated || trusted == trustNone {
		return c.file.AddressKey, tenant.CheckAddressKey(c.file.AddressKey)
	}
	if c.file.AddressKey != "" && key != c.file.AddressKey {
		return "", fmt.Errorf(
			"annotation %s: the key is %.200q there and %.200q in the network configuration; nothing was changed: "+
				"remove it from the annotation, or from the network configuration",
			keyAnnotation,
			key,
			c.file.AddressKey,
		)
	}
	if err := tenant.CheckAddressKey(key); err != nil {
		return "", fmt.Errorf("annotation %s: %w", keyAnnotation, err)
	}
	return key, nil
}
