package cniserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"
)

// call is one call of the plugin.
type call struct {
	verb                     string
	containerID, netns, name string // name of the interface
	args                     string // CNI_ARGS
	config                   []byte
}

// verbs has, for each CNI verb, the required variables and the first version of the specification with the verb.
var verbs = map[string]struct {
	needs []string
	since string
}{
	"ADD":    {[]string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}, "1.0.0"},
	"DEL":    {[]string{"CNI_CONTAINERID", "CNI_IFNAME"}, "1.0.0"},
	"CHECK":  {[]string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}, "1.0.0"},
	"GC":     {nil, "1.1.0"},
	"STATUS": {nil, "1.1.0"},
}

// parseCall reads a request of the plugin: the variables, each followed by a NUL, an empty variable, and the
// configuration.
func parseCall(body []byte) (call, *types.Error) {
	env := map[string]string{}
	for {
		variable, rest, ok := bytes.Cut(body, []byte{0})
		if !ok {
			return call{}, types.NewError(types.ErrDecodingFailure, "the plugin's request is incomplete", "")
		}
		body = rest
		if len(variable) == 0 {
			break
		}
		name, value, _ := strings.Cut(string(variable), "=")
		env[name] = value
	}
	c := call{
		verb: env["CNI_COMMAND"], containerID: env["CNI_CONTAINERID"], netns: env["CNI_NETNS"], name: env["CNI_IFNAME"],
		args: env["CNI_ARGS"], config: body,
	}
	verb, ok := verbs[c.verb]
	if !ok {
		return call{}, types.NewError(
			types.ErrInvalidEnvironmentVariables,
			fmt.Sprintf("unknown CNI_COMMAND: %q", c.verb),
			"",
		)
	}
	if missing := slices.DeleteFunc(slices.Clone(verb.needs), func(name string) bool { return env[name] != "" }); len(
		missing,
	) > 0 {
		return c, types.NewError(
			types.ErrInvalidEnvironmentVariables,
			fmt.Sprintf("required env variables [%s] missing", strings.Join(missing, ",")),
			"",
		)
	}
	if slices.Contains(verb.needs, "CNI_CONTAINERID") {
		if err := utils.ValidateContainerID(c.containerID); err != nil {
			return c, err
		}
		if err := utils.ValidateInterfaceName(c.name); err != nil {
			return c, err
		}
	}
	return c, checkHead(c.config, c.verb, verb.since)
}

// checkHead checks the keys that every configuration must have.
func checkHead(config []byte, verb, since string) *types.Error {
	var head struct {
		Name    string `json:"name"`
		Version string `json:"cniVersion"`
	}
	if err := json.Unmarshal(config, &head); err != nil {
		return types.NewError(types.ErrDecodingFailure, "the network configuration cannot be read", err.Error())
	}
	if head.Name == "" {
		return types.NewError(types.ErrInvalidNetworkConfig, "missing network name", "")
	}
	if err := utils.ValidateNetworkName(head.Name); err != nil {
		return err
	}
	var reconciler version.Reconciler
	if err := reconciler.Check(head.Version, Versions()); err != nil {
		return types.NewError(types.ErrIncompatibleCNIVersion, "incompatible CNI versions", err.Details())
	}
	if new, err := version.GreaterThanOrEqualTo(head.Version, since); err != nil || !new {
		return types.NewError(
			types.ErrIncompatibleCNIVersion,
			fmt.Sprintf("%s needs a configuration of version %s", verb, since),
			"",
		)
	}
	return nil
}
