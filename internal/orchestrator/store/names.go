package store

import (
	"regexp"
	"strings"

	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/tenant"
)

var labelForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// checkTenant refuses an invalid name.
func checkTenant(name string) error {
	if err := tenant.CheckName(name); err != nil {
		return refuse(Invalid, "%v", err)
	}
	return nil
}

// CheckNode refuses an invalid name or UUID of a node. A name is DNS labels joined by dots, at most 63 characters
// together, so that it fits the common name of a certificate. A UUID is in lower case.
func CheckNode(name, uuid string) error {
	ok := len(name) <= 63
	for label := range strings.SplitSeq(name, ".") {
		ok = ok && labelForm.MatchString(label)
	}
	if !ok {
		return refuse(
			Invalid,
			"node name %.80q is not a host name: use 1 to 63 of a-z, 0-9, - and ., each part starting and ending with "+
				"a letter or digit; choose one with --node-name",
			name,
		)
	}
	if !join.IsUUID(uuid) {
		return refuse(Invalid, "node UUID %.80q is not 32 lower-case hexadecimal digits in 5 groups", uuid)
	}
	return nil
}
