# Sourced by sanitize.sh: what is left out under which sanitizer, and why.
case $kind in
address) ;;
thread) ;;
undefined) ;;
esac
